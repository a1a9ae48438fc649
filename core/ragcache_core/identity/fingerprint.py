"""Which model produced a KV: the fingerprint of a model folder, and the KV space it defines.

Gateway and engine compute both independently from the same folder, so neither has to trust the
other. The functions take file contents, not paths: the caller reads the files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import KVSpace

WEIGHT_SAMPLE_BYTES = 1 << 20
"""How many bytes at each end of a weights file are hashed.

Hashing 100 GB would take minutes, and a fine-tune changes every tensor.
"""

# Fields of config.json that change the meaning of KV. The others (names, versions) do not.
_KV_FIELDS = (
    "architectures",
    "hidden_size",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "model_type",
    "no_rope_layers",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "position_embedding_type",
    "quantization_config",
    "rms_norm_eps",
    "rope_local_base_freq",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rotary_emb_base",
    "rotary_emb_fraction",
    "rotary_pct",
    "sliding_window",
    "vocab_size",
)


@dataclass(frozen=True, slots=True)
class WeightsSample:
    """A weights file: its name, its size in bytes, and the bytes at its beginning and end."""

    name: str
    size: int
    first: bytes
    last: bytes


def model_fingerprint(
    config: Mapping[str, Any], tokenizer: bytes, weights: Sequence[WeightsSample]
) -> str:
    """Return the fingerprint of a model: 32 hex digits.

    Args:
        config: Content of config.json.
        tokenizer: Bytes of tokenizer.json.
        weights: All weights files, in any order.
    """
    hasher = hashlib.blake2b(digest_size=16, person=b"ragcache-model")
    kv_config = {name: config[name] for name in _KV_FIELDS if name in config}
    hasher.update(json.dumps(kv_config, sort_keys=True).encode() + b"\0")
    hasher.update(hashlib.blake2b(tokenizer).digest())
    for sample in sorted(weights, key=lambda s: s.name):
        hasher.update(f"{sample.name}\0{sample.size}\0".encode())
        hasher.update(sample.first)
        hasher.update(sample.last)
    return hasher.hexdigest()


def kv_space(fingerprint: str, config: Mapping[str, Any], dtype: str) -> KVSpace:
    """Return the KV space of a decoder with ordinary (grouped-query) attention.

    Args:
        fingerprint: From ``model_fingerprint``.
        config: Content of config.json.
        dtype: As the engine stores KV. ``auto`` resolves as in vLLM: the dtype of the checkpoint,
            but bfloat16 for float32 or a checkpoint that names none.

    Raises:
        InvalidInput: The config lacks a size.
    """
    try:
        heads = int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        layers = int(config["num_hidden_layers"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput(
            "config.json", f"lacks {error}", "name a Hugging Face decoder model"
        ) from error
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        dtype = "bfloat16" if dtype == "float32" else dtype
    return KVSpace(fingerprint, layers, kv_heads, head_dim, dtype)
