"""Checks at start that the connector supports vLLM's configuration and the model's KV."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import KVSpace
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_wire.settings import EngineSettings

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_DEFAULT_BRANCH: Final = "main"
"""Default branch of the Hugging Face hub. The gateway reads the model's files on it."""
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_CONFIG_FORMATS: Final = ("auto", "hf", "mistral")
_SAFETENSORS_FORMATS: Final = frozenset(
    {
        *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral"),
        *("runai_streamer", "runai_streamer_sharded", "sharded_state"),
    }
)
"""Load formats that read the folder's ``*.safetensors``. ``auto`` and ``hf`` read others only if
there are none. A folder without them has no fingerprint. A commit of the hub names all files."""


def check_config(vllm_config: VllmConfig, settings: EngineSettings) -> None:
    """Check vLLM's configuration.

    Raises:
        InvalidInput: The connector does not support it.
    """
    parallel = vllm_config.parallel_config
    if parallel.world_size_across_dp > parallel.tensor_parallel_size:
        raise InvalidInput(
            "engines[].args",
            "ask for pipeline, data or prefill context parallel ranks",
            "set spec.engines[].tensorParallel, or run more engines",
        )
    if parallel.decode_context_parallel_size > 1:
        raise InvalidInput(
            "engines[].args",
            "set --decode-context-parallel-size, so a rank has the tokens of other ranks' heads",
            "leave it out",
        )
    if parallel.tensor_parallel_size > 1 and settings.layerwise:
        # A pass would wait for a layer on one rank, and not on another one that has lost it.
        raise InvalidInput(
            "RAGCACHE_LAYERWISE",
            "is on together with several ranks",
            "leave out one of the two",
        )
    _check_model(vllm_config)
    if vllm_config.speculative_config is not None and settings.layerwise:
        # vLLM then asks for load errors of a pass before the pass has ended.
        raise InvalidInput(
            "RAGCACHE_LAYERWISE",
            "is on together with speculative decoding",
            "leave out one of the two",
        )
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_role != "kv_both":
        # vLLM assumes that a producer loads nothing, and that a consumer saves nothing.
        raise InvalidInput(
            "kv_role", f"is {transfer.kv_role!r}", "set it to kv_both: plans name an engine's part"
        )
    if transfer.kv_load_failure_policy != "recompute":
        raise InvalidInput(
            "kv_load_failure_policy",
            f"is {transfer.kv_load_failure_policy!r}",
            "set it to recompute: the engine can compute what it cannot load",
        )


def check_ranks(space: KVSpace) -> None:
    """Check that each tensor parallel rank has heads of its own.

    Raises:
        InvalidInput: vLLM would give several ranks the same heads, or ranks unlike numbers.
    """
    if space.num_kv_heads % space.num_ranks:
        raise InvalidInput(
            "engines[].tensorParallel",
            f"is {space.num_ranks}, and the model has {space.num_kv_heads} KV heads",
            f"choose a number that divides {space.num_kv_heads}",
        )


def check_kind(model: ModelConfig) -> None:
    """Check that a model has keys and values by head in every layer, in its own dtype.

    vLLM fails to start with some of the other models before it makes the connector. So each worker
    calls this first (``plugin``).

    Raises:
        InvalidInput: It has another kind of KV.
    """
    quantization = getattr(model.hf_config, "quantization_config", None)
    if isinstance(quantization, dict) and quantization.get("kv_cache_scheme"):
        raise InvalidInput(
            "model.source",
            "has scales for KV in FP8 (quantization_config.kv_cache_scheme in its config.json), and"
            " the store keeps KV without scales",
            "name a checkpoint whose KV cache is not quantized",
        )
    if getattr(model, "use_mla", False):
        raise InvalidInput(
            "model.source",
            "has latent attention (MLA), which keeps one vector per token in place of keys and"
            " values by head",
            "name a decoder model with ordinary attention in every layer, or serve this one"
            " without the connector",
        )
    if getattr(model, "is_hybrid", False):
        raise InvalidInput(
            "model.source",
            "has layers with a state (Mamba or linear attention) in place of keys and values",
            "name a decoder model with attention in every layer, or serve this one without the"
            " connector",
        )


def _check_model(vllm_config: VllmConfig) -> None:
    model = vllm_config.model_config
    check_kind(model)
    quantized_in_folder = getattr(model.hf_config, "quantization_config", None) is not None
    if model.hf_overrides or (model.quantization and not quantized_in_folder):
        # Keys are a hash of the model's folder, which does not contain these options.
        raise InvalidInput(
            "engines[].args",
            "set --hf-overrides or --quantization",
            "make a model folder whose config.json has these settings",
        )
    _check_model_files(vllm_config)
    if model.enable_sleep_mode:
        # Sleep discards KV that the connector has yet to copy out.
        raise InvalidInput("engines[].args", "set --enable-sleep-mode", "leave it out")
    if vllm_config.cache_config.cache_dtype != "auto":
        raise InvalidInput(
            "engines[].args",
            "set --kv-cache-dtype",
            "leave it out: the store keeps KV in the model's type",
        )


def _check_model_files(vllm_config: VllmConfig) -> None:
    """Check that vLLM reads the files that keys are a hash of, and no others."""
    model = vllm_config.model_config
    is_folder = Path(model.model).is_dir()
    load_format = vllm_config.load_config.load_format
    changes = {
        # vLLM ignores the revisions of a folder, and resolves an unset one to the default branch.
        "--revision": not is_folder and not _is_pinned(model.revision),
        "--code-revision": not is_folder and model.code_revision is not None,
        "--hf-config-path": model.hf_config_path not in (None, model.model),
        "--config-format": model.config_format not in _CONFIG_FORMATS,
        "--model-class-overrides": bool(model.model_class_overrides),
        "--load-format": load_format not in _SAFETENSORS_FORMATS,
    }
    wrong = [flag for flag, is_changed in changes.items() if is_changed]
    if wrong:
        raise InvalidInput(
            "engines[].args",
            f"set {' and '.join(wrong)}, so vLLM serves another model than the one that names the"
            " stored KV",
            "leave it out, or download that model and name its folder of safetensors",
        )


def _is_pinned(revision: str | None) -> bool:
    """Whether the gateway reads the same files: those of the default branch, or of a commit.

    A model source with another commit has other keys, so its KV is never mixed up.
    """
    return revision in (None, _DEFAULT_BRANCH) or _COMMIT.fullmatch(revision) is not None


def check_full_attention(kv_cache_config: KVCacheConfig, max_length: int) -> None:
    """Check that vLLM keeps the KV of all tokens.

    With a sliding window in all layers vLLM frees older blocks, but its prefix cache still finds
    the prompt. The connector would save blocks that hold other KV. With windows in some layers
    only, vLLM keeps all blocks. A window of all tokens frees none.

    Args:
        kv_cache_config: vLLM's KV cache.
        max_length: Most tokens of prompt and answer together.

    Raises:
        InvalidInput: vLLM frees the KV of older tokens, or layers keep KV in several ways.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) > 1:
        raise InvalidInput(
            "model.source",
            f"has layers that keep KV in {len(groups)} ways, each with blocks of its own",
            "name a decoder model whose layers have KV of one shape",
        )
    for group in groups:
        spec = group.kv_cache_spec
        uniform = isinstance(spec, UniformTypeKVCacheSpecs)
        for layer_spec in spec.kv_cache_specs.values() if uniform else (spec,):
            # Subclasses keep other things: latent vectors, or blocks that are evicted.
            kind = type(layer_spec)
            never_full = kind is SlidingWindowSpec and layer_spec.sliding_window >= max_length
            if kind is not FullAttentionSpec and not never_full:
                raise InvalidInput(
                    "model.source",
                    f"has KV of kind {kind.__name__}, which vLLM keeps only in part",
                    "name a decoder model with full attention; if its attention has a window,"
                    " choose a maxLength that fits it, or add --disable-sliding-window",
                )


def check_layout(cache: PagedCache, space: KVSpace) -> None:
    """Check that vLLM's cache has the layout that config.json implies, which keys depend on.

    Raises:
        InvalidInput: The layouts differ.
    """
    shape = cache.shape
    dtype = str(shape.dtype).removeprefix("torch.")
    found = (cache.num_layers, shape.num_kv_heads, shape.head_dim, dtype)
    expected = (space.num_layers, space.num_kv_heads, space.head_dim, space.dtype)
    if found != expected:
        raise InvalidInput(
            "model.source",
            f"has KV of (layers, heads, head_dim, dtype) {found}, its config.json says {expected}",
            "name a decoder model with ordinary attention in every layer",
        )
