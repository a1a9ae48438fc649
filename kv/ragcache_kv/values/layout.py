"""The KV of one chunk as bytes.

Format 2: a value is one part for each layer, in the order an engine computes them. A native part is
bf16 (or the KV space's own dtype) as is, ``[2, num_tokens, num_kv_heads, head_dim]`` in C order,
keys first; the parts of a native value follow each other, so that it reads as
``[num_layers, 2, num_tokens, num_kv_heads, head_dim]``. A part held with another precision is its
keys and then its values, each coded by itself (``ragcache_kv.codecs``): no part needs another one
to be decoded, and the layouts of all codecs belong to this format's number.

It is independent of any engine's paged layout: a packed CPU block could not be put at another
offset nor read by another instruction set (vLLM's CPU backends pack keys and values differently).
"""

from __future__ import annotations

import xxhash

from ragcache_core.identity.keys import KVSpace
from ragcache_core.identity.variant import ValueShape

FORMAT = 2

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def value_parts(shape: KVSpace | ValueShape, num_tokens: int) -> tuple[int, ...]:
    """Sizes of a native value's parts. Raises KeyError for a dtype that is no KV's."""
    part_bytes = 2 * num_tokens * shape.num_kv_heads * shape.head_dim * ELEMENT_BYTES[shape.dtype]
    return (part_bytes,) * shape.num_layers


def value_bytes(shape: KVSpace | ValueShape, num_tokens: int) -> int:
    """Size of a native value. Raises KeyError for a dtype that is no KV's."""
    return sum(value_parts(shape, num_tokens))


def checksum(value: bytes | bytearray | memoryview) -> int:
    """XXH3-64 of a value or of one part, as unsigned 64-bit."""
    return xxhash.xxh3_64_intdigest(value)
