"""The families of models that are checked, as small configurations for transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

MAX_LENGTH: Final = 2048
"""Most tokens of prompt and answer in the check."""

WINDOW: Final = 96
"""Sliding window of small models: shorter than a chunk and what is before it."""

_LAYERS: Final = 4

SHAPE: Final[Mapping[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "vocab_size": 384,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 383,
    "pad_token_id": None,
}
"""Settings of all models. Weights are larger than usual initial ones, so that attention is not
uniform and wrong KV changes the next token."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models.

    Attributes:
        examples: Published models of the family.
        config: Settings beside ``SHAPE``.
        reads_images: Whether ``config`` is the ``text_config`` of a model that also reads images.
    """

    examples: str
    config: Mapping[str, Any]
    reads_images: bool = False


def _plain(theta: float = 10_000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


def _experts(**named: Any) -> dict[str, Any]:
    return {"num_experts_per_tok": 2, **named}


_WINDOWS: Final[Mapping[str, Any]] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * (_LAYERS // 2),
}
_TWO_TABLES: Final[Mapping[str, Any]] = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
}
_GEMMA3: Final[Mapping[str, Any]] = {
    "model_type": "gemma3_text",
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    **_WINDOWS,
    **_TWO_TABLES,
}
_YARN: Final[Mapping[str, Any]] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_LONGROPE: Final[Mapping[str, Any]] = {
    "original_max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0 + 0.01 * pair for pair in range(16)],
        "long_factor": [1.0 + 0.5 * pair for pair in range(16)],
        "original_max_position_embeddings": 1024,
    },
}
_LLAMA3: Final[Mapping[str, Any]] = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}

FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family("Llama 3", {"model_type": "llama", "rope_parameters": _LLAMA3}),
    "mistral": Family(
        "Mistral 7B", {"model_type": "mistral", "sliding_window": None, **_plain(1e6)}
    ),
    "mixtral": Family(
        "Mixtral 8x7B", {"model_type": "mixtral", **_experts(num_local_experts=4), **_plain(1e6)}
    ),
    "mistral3": Family(
        "Mistral Small 3.1 and 3.2",
        {"model_type": "mistral", "head_dim": 32, "sliding_window": None, **_plain(1e9)},
        reads_images=True,
    ),
    "ministral3": Family(
        "Ministral 3",
        {
            "model_type": "ministral3",
            "head_dim": 32,
            "rope_parameters": {
                **_YARN,
                "rope_theta": 1e6,
                "llama_4_scaling_beta": 0.1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "qwen2": Family(
        "Qwen2.5", {"model_type": "qwen2", "rope_parameters": {**_YARN, "rope_theta": 1e6}}
    ),
    "qwen3": Family("Qwen3", {"model_type": "qwen3", "head_dim": 64, **_plain(1e6)}),
    "qwen3_moe": Family(
        "Qwen3 30B A3B",
        {
            "model_type": "qwen3_moe",
            "head_dim": 64,
            "moe_intermediate_size": 128,
            **_experts(num_experts=4),
            **_plain(1e6),
        },
    ),
    "qwen2_moe": Family(
        "Qwen1.5 MoE",
        {
            "model_type": "qwen2_moe",
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            **_experts(num_experts=4),
            **_plain(1e6),
        },
    ),
    "glm4": Family(
        "GLM-4 9B", {"model_type": "glm4", "head_dim": 32, **_plain(partial_rotary_factor=0.5)}
    ),
    "glm4_moe": Family(
        "GLM-4.5 Air",
        {
            "model_type": "glm4_moe",
            "head_dim": 32,
            "moe_intermediate_size": 128,
            "n_routed_experts": 4,
            "num_nextn_predict_layers": 0,
            **_experts(),
            **_plain(1e6, partial_rotary_factor=0.5),
        },
    ),
    "minimax_m2": Family(
        "MiniMax-M2",
        {
            "model_type": "minimax_m2",
            "head_dim": 32,
            "rotary_dim": 16,
            "qk_norm_type": "per_layer",
            "use_routing_bias": True,
            "scoring_func": "softmax",  # the published one is sigmoid, which no CPU's router has
            "use_qk_norm": True,
            **_experts(num_local_experts=4),
            **_plain(5e6),
        },
    ),
    "granite": Family(
        "Granite 4.1", {"model_type": "granite", "attention_multiplier": 0.18, **_plain()}
    ),
    "phi3": Family("Phi-4", {"model_type": "phi3", **_plain(250_000.0)}),
    "phi3, longrope": Family(
        "Phi-4-mini, Phi-3.5", {"model_type": "phi3", "sliding_window": 262_144, **_LONGROPE}
    ),
    "gemma": Family("Gemma", {"model_type": "gemma", "head_dim": 32, **_plain()}),
    "gemma2": Family(
        "Gemma 2",
        {
            "model_type": "gemma2",
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 20.0,
            **_WINDOWS,
            **_plain(),
        },
    ),
    "gemma3": Family("Gemma 3 1B", _GEMMA3),
    "gemma3, images": Family("Gemma 3 4B to 27B", _GEMMA3, reads_images=True),
    "gpt_oss": Family(
        "gpt-oss 20b and 120b",
        {
            "model_type": "gpt_oss",
            "head_dim": 32,
            "hidden_size": 128,
            "intermediate_size": 128,
            **_experts(num_local_experts=4),
            **_WINDOWS,
            "rope_parameters": {**_YARN, "rope_theta": 150_000.0, "truncate": False},
        },
    ),
    "cohere": Family("Command R", {"model_type": "cohere", **_plain()}),
    "cohere2": Family("Command A", {"model_type": "cohere2", **_WINDOWS, **_plain()}),
    "exaone4": Family("EXAONE 4", {"model_type": "exaone4", **_WINDOWS, **_plain()}),
    "ernie4_5": Family("ERNIE 4.5", {"model_type": "ernie4_5", "head_dim": 32, **_plain()}),
    "stablelm": Family(
        "StableLM 2", {"model_type": "stablelm", **_plain(partial_rotary_factor=0.25)}
    ),
    "opt": Family(
        "OPT",
        {
            "model_type": "opt",
            "num_key_value_heads": 4,
            "ffn_dim": 256,
            "word_embed_proj_dim": 128,
            "init_std": 0.15,
            "dropout": 0.0,
        },
    ),
    "mistral, window": Family(
        "Mistral 7B v0.1", {"model_type": "mistral", "sliding_window": WINDOW, **_plain()}
    ),
    "gemma4": Family(
        "Gemma 4",
        {
            "model_type": "gemma4_text",
            "head_dim": 32,
            "global_head_dim": 64,
            **_WINDOWS,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1e6,
                    "partial_rotary_factor": 0.25,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "deepseek_v3": Family(
        "DeepSeek V3, Kimi K2",
        {
            "model_type": "deepseek_v3",
            "num_key_value_heads": 4,
            "kv_lora_rank": 64,
            "q_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 32,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "moe_intermediate_size": 128,
            **_experts(),
            **_plain(),
        },
    ),
    "qwen3_5": Family(
        "Qwen3.5",
        {
            "model_type": "qwen3_next",
            "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"] * (_LAYERS // 2),
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            **_experts(num_experts=4),
            **_plain(partial_rotary_factor=0.5),
        },
    ),
}
