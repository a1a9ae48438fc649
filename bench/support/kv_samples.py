"""KV samples for codecs: of the bundled model over its handbook, and heavy-tailed random."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.tinyrag.handbook import make_handbook
from ragcache_core.identity.variant import ValueShape

MODEL = Path(__file__).resolve().parents[2] / "models/tinyrag/model"
QUERIES = 64
"""Number of last positions of a text whose attention is measured."""


@dataclass(frozen=True, slots=True)
class Sample:
    """KV of one text in bf16, and queries over it.

    value: uint8, native format. queries: float32, [layers, heads, QUERIES, head_dim], of the last
    positions; as many heads as the keys have.
    """

    shape: ValueShape
    num_tokens: int
    value: np.ndarray
    queries: np.ndarray


def real_samples(texts: int, tokens: int) -> list[Sample]:
    """The bundled model's own keys, values and queries, rotated, over handbook pages."""
    import torch  # noqa: PLC0415
    from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: PLC0415
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model: Any = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).eval()
    config = model.config
    shape = ValueShape(
        config.num_hidden_layers, config.num_key_value_heads, config.head_dim, "bfloat16"
    )
    projected: list[Any] = []
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(
            lambda _module, _inputs, output: projected.append(output)
        )
    samples = []
    for seed in range(texts):
        pages = make_handbook(seed, 40, "held_out").documents
        text = "\n\n".join(page.text for page in pages)
        ids = torch.tensor(
            [tokenizer(text[: 8 * tokens], add_special_tokens=False).input_ids[:tokens]]
        )
        projected.clear()
        with torch.inference_mode():
            cache = model(ids, use_cache=True).past_key_values
            layers = [torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers]
            value = torch.stack(layers).transpose(2, 3).contiguous()
            cos, sin = model.model.rotary_emb(value, torch.arange(ids.shape[1])[None])
            rotated = [
                apply_rotary_pos_emb(
                    query.view(1, ids.shape[1], -1, config.head_dim).transpose(1, 2),
                    query.view(1, ids.shape[1], -1, config.head_dim).transpose(1, 2),
                    cos,
                    sin,
                )[0][0, :, -QUERIES:]
                for query in projected
            ]
        native = value.view(torch.uint8).numpy().reshape(-1)
        samples.append(Sample(shape, ids.shape[1], native, torch.stack(rotated).float().numpy()))
    return samples


def heavy_tailed_sample(seed: int, tokens: int) -> Sample:
    """Student's t with 3 degrees of freedom, and in the keys a few channels 20 times as large.

    Such channels are what large models have in their keys and small ones lack.
    """
    shape = ValueShape(2, 8, 128, "bfloat16")
    rng = np.random.default_rng(seed)
    kv = rng.standard_t(3, (2, 2, tokens, 8, 128)).astype(np.float32)
    for layer in range(2):
        kv[layer, 0, :, :, rng.choice(128, 4, replace=False)] *= 20
    queries = rng.standard_normal((2, 8, QUERIES, 128)).astype(np.float32) / 20
    return Sample(shape, tokens, to_bfloat16(kv), queries)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Bytes of the values as bf16, cut off."""
    return (values.reshape(-1).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def attention(value: np.ndarray, sample: Sample) -> np.ndarray:
    """Outputs of causal attention of the sample's queries over value: float32."""
    kv = from_bfloat16(value).reshape(
        sample.shape.num_layers, 2, sample.num_tokens, -1, sample.shape.head_dim
    )
    keys, values = kv[:, 0].transpose(0, 2, 3, 1), kv[:, 1].transpose(0, 2, 1, 3)
    scores = sample.queries @ keys / np.sqrt(sample.shape.head_dim)
    ahead = np.arange(sample.num_tokens) > np.arange(-QUERIES, 0)[:, None] + sample.num_tokens
    scores = np.where(ahead, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)) @ values


def from_bfloat16(value: np.ndarray) -> np.ndarray:
    """The float32 of bf16 bytes."""
    return (value.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
