"""Which model produced a KV: the fingerprint of a model folder, and the KV space it defines.

Gateway and engine compute both independently from the same folder, so neither has to trust the
other. The functions take file contents, not paths: the caller reads the files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import KVSpace

_FIELDS_WITHOUT_EFFECT = frozenset(
    {
        *("_name_or_path", "_commit_hash", "transformers_version"),
        *("dtype", "torch_dtype"),  # part of the KV space
        *("use_cache", "bos_token_id", "eos_token_id"),
    }
)
"""Top-level fields of config.json that do not change KV.

All others count. A field that does not change KV then costs reuse, once. A field that does change
KV, and is left out, makes an engine use the KV of another model.
"""


def model_fingerprint(
    config: Mapping[str, Any], other_files: Mapping[str, bytes], weights: bytes
) -> str:
    """Return the fingerprint of a model: 32 hex digits.

    Args:
        config: Content of config.json.
        other_files: Contents of the other files that change KV, such as tokenizer.json, by name.
        weights: Digest of the weights (``weights_sample``).
    """
    hasher = hashlib.blake2b(digest_size=16, person=b"ragcache-model")
    effective = {
        name: value for name, value in config.items() if name not in _FIELDS_WITHOUT_EFFECT
    }
    hasher.update(json.dumps(effective, sort_keys=True).encode() + b"\0")
    for name, content in sorted(other_files.items()):
        hasher.update(f"{name}\0{len(content)}\0".encode() + content)
    hasher.update(weights)
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
