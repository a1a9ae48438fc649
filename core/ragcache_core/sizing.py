"""The memory and the volume of a replica of the retriever, and of a shard of the cache store.

The operator derives the resources of the pods from them.
"""

from __future__ import annotations

import math
from typing import Final, Literal

from ragcache_core.storage.extents import PAGE_BYTES

_RETRIEVER_PROCESS_BYTES: Final = 768 << 20
"""Memory of the process with the bundled embedder, besides the index."""
_NUMBER_BYTES: Final = {"float32": 4, "sq8": 1}
_GRAPH_BYTES: Final = 272
"""Memory of the links of one vector in an HNSW graph."""
_ROW_BYTES: Final = 24
"""Memory of the row number of a vector, its number in its cell, and its place there."""
_TEXT_TOKEN_BYTES: Final = 18
"""Bytes on the volume for each token: its text, its words for the lexical search, and its id. A
chunk of 256 tokens with a vector of 384 numbers takes 6 KiB."""


def index_bytes(
    num_vectors: int, dimension: int, precision: Literal["float32", "sq8"], *, has_graph: bool
) -> int:
    """Return the memory of a vector index.

    Args:
        dimension: Numbers of a vector.
        has_graph: Whether the index is an HNSW graph.
    """
    vector_bytes = dimension * _NUMBER_BYTES[precision] + _ROW_BYTES
    return num_vectors * (vector_bytes + (_GRAPH_BYTES if has_graph else 0))


def retriever_memory_bytes(index: int) -> int:
    """Return the memory of the process with an index of this size, in whole MiB.

    It holds the index twice while the next one is built beside it.
    """
    return -(-(_RETRIEVER_PROCESS_BYTES + 2 * index) >> 20) << 20


def documents_bytes(num_chunks: int, chunk_tokens: int, dimension: int) -> int:
    """Return the size of the documents, chunks and vectors on the volume."""
    return num_chunks * (chunk_tokens * _TEXT_TOKEN_BYTES + dimension * _NUMBER_BYTES["float32"])


LOW_WATERMARK: Final = 0.90
"""Share of a tier that the store keeps filled."""
_LEAST_VALUES: Final = 4
"""The memory tier holds at least this many of the largest values, because each passes through."""
_STORE_PROCESS_BYTES: Final = 960 << 20
"""Memory of the process besides the memory tier. It needs 75 MiB, 160 more once it packs values, 64
for deletes, 128 for connections, and up to 256 MiB for each copy of a value that it packs or sends
by gRPC."""
_DISK_PER_MEMORY: Final = 256
"""Bytes of disk for each byte of memory that the records of values take. A record of a value of 28
layers takes 6.5 KiB, so values below 1.6 MiB need more."""
_DISK_SHARE: Final = 0.9
"""Share of the volume for values and the reserve. The file system and RocksDB use the rest, RocksDB
about one kilobyte for each value."""
_DISK_RESERVE_BYTES: Final = 64 << 20
"""Space that the store always leaves free for records (its FREE_RESERVE_BYTES). With less space, it
would refuse values as on a full disk, before it evicts others."""


def disk_tier_bytes(volume_bytes: int) -> int:
    """Return the bytes of values that fit on a volume."""
    return max(int(volume_bytes * _DISK_SHARE) - _DISK_RESERVE_BYTES, PAGE_BYTES)


def volume_bytes(tier_bytes: int) -> int:
    """Return a size of volume whose disk tier has at least these bytes."""
    return math.ceil((tier_bytes + _DISK_RESERVE_BYTES + 1) / _DISK_SHARE)


def shard_memory_bytes(memory_tier_bytes: int, disk_bytes: int) -> int:
    """Return the memory of a shard's process. disk_bytes: Size of the volume."""
    records_bytes = -(-disk_bytes // _DISK_PER_MEMORY >> 20) << 20
    return memory_tier_bytes + _STORE_PROCESS_BYTES + records_bytes


def _in_pages(num_bytes: int) -> int:
    """Return the bytes that a value takes in a tier, in whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def tier_bytes(num_values: int, value_bytes: int) -> int:
    """Return the size of a tier that keeps a number of values of one size."""
    return math.ceil(num_values * _in_pages(value_bytes) / LOW_WATERMARK)


def least_memory_tier_bytes(native_value_bytes: int) -> int:
    """Return the smallest memory tier for values of a size."""
    return _LEAST_VALUES * _in_pages(native_value_bytes)
