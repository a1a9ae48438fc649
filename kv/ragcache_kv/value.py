"""The KV of one chunk as bytes.

Format 1: bf16 (or the KV space's own dtype) as is, natural layout, C order,
``[num_layers, 2, num_tokens, num_kv_heads, head_dim]`` with keys first. It is independent of any
engine's paged layout: a packed CPU block could not be put at another offset nor read by another
instruction set (vLLM's CPU backends pack keys and values differently).
"""

from __future__ import annotations

import xxhash

from ragcache_core.keys import KVSpace

FORMAT = 1

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def value_bytes(space: KVSpace, num_tokens: int) -> int:
    """Size of a chunk's value. Raises KeyError for a dtype that format 1 does not hold."""
    per_token = space.num_layers * 2 * space.num_kv_heads * space.head_dim
    return per_token * num_tokens * ELEMENT_BYTES[space.dtype]


def checksum(value: bytes | bytearray | memoryview) -> int:
    """XXH3-64 of a value, as unsigned 64-bit."""
    return xxhash.xxh3_64_intdigest(value)
