"""The memory and the volume of one shard of the cache store.

The operator derives the pod's resources from them.
"""

from __future__ import annotations

import math
from typing import Final

from ragcache_core.storage.extents import PAGE_BYTES

LOW_WATERMARK: Final = 0.90
"""Share of a tier that the store keeps filled."""
_LEAST_VALUES: Final = 4
"""The memory tier holds at least this many of the largest values, because each passes through."""
_PROCESS_BYTES: Final = 960 << 20
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
    return memory_tier_bytes + _PROCESS_BYTES + records_bytes


def _in_pages(num_bytes: int) -> int:
    """Return the bytes that a value takes in a tier, in whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def tier_bytes(num_values: int, value_bytes: int) -> int:
    """Return the size of a tier that keeps a number of values of one size."""
    return math.ceil(num_values * _in_pages(value_bytes) / LOW_WATERMARK)


def least_memory_tier_bytes(native_value_bytes: int) -> int:
    """Return the smallest memory tier for values of a size."""
    return _LEAST_VALUES * _in_pages(native_value_bytes)
