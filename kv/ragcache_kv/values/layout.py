"""The layout of one chunk's KV as bytes.

Format 2: a value has one part for each layer, in the order in which an engine computes them. A
native part has the elements of the KV space's dtype in C order, keys first:
``[2, num_tokens, num_kv_heads, head_dim]``. The parts follow each other, so a native value has the
shape ``[num_layers, 2, num_tokens, num_kv_heads, head_dim]``.

A part of another precision has its keys and then its values, each encoded on its own
(``ragcache_kv.codecs``). Each part can be decoded alone. The layouts of all codecs belong to the
format's number.

The layout is independent of an engine's paged layout. vLLM's CPU backends pack keys and values for
one instruction set and one offset, so a packed block could not be reused elsewhere.
"""

from __future__ import annotations

import xxhash

from ragcache_core.identity.keys import KVSpace
from ragcache_core.identity.variant import ValueShape

FORMAT = 2

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def value_parts(shape: KVSpace | ValueShape, num_tokens: int) -> tuple[int, ...]:
    """Return the sizes of a native value's parts. Raises KeyError for an unknown dtype."""
    part_bytes = 2 * num_tokens * shape.num_kv_heads * shape.head_dim * ELEMENT_BYTES[shape.dtype]
    return (part_bytes,) * shape.num_layers


def value_bytes(shape: KVSpace | ValueShape, num_tokens: int) -> int:
    """Return the size of a native value. Raises KeyError for an unknown dtype."""
    return sum(value_parts(shape, num_tokens))


def checksum(value: bytes | bytearray | memoryview) -> int:
    """Return the XXH3-64 of a value or of one part, as an unsigned integer."""
    return xxhash.xxh3_64_intdigest(value)
