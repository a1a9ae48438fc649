"""A value that a worker's tier stores, and reads of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ragcache_core.tiering.precision_assignment import Placement
from ragcache_engine.kv_cache.chunk_pool import ChunkPool, PoolAllocation
from ragcache_engine.kv_cache.offered_value import OfferedValue

TIER_NAMES = {Placement.GPU: "device", Placement.PINNED: "host"}
"""The names of the tiers in metrics and logs."""


@dataclass(slots=True, eq=False)
class TierValue:
    """A value in a tier.

    Attributes:
        offer: The offer that the value came from.
        tier: The tier that stores it.
        allocation: Its pages in the tier's pool.
        readers: Number of reads that use these pages.
        retired: Whether reads no longer find the value. Its last reader frees the pages.
    """

    offer: OfferedValue
    tier: Placement
    allocation: PoolAllocation
    readers: int = 0
    retired: bool = False


class TierRead:
    """A read of a value. The tier does not change the bytes until the read is closed or collected.

    The device must have finished its copies by then.
    """

    def __init__(
        self, pool: ChunkPool, value: TierValue, on_close: Callable[[TierValue], None]
    ) -> None:
        self._pool = pool
        self._value = value
        self._finalizer = weakref.finalize(self, on_close, value)
        self._finalizer.atexit = False

    @property
    def tier(self) -> str:
        """Name of the tier that stores the value."""
        return TIER_NAMES[self._value.tier]

    def pieces(self, start: int, end: int) -> Sequence[torch.Tensor]:
        """Return views of tokens [start, end), in order; see ``ChunkPool.views``."""
        return self._pool.views(self._value.allocation, start, end)

    def close(self) -> None:
        """End the read. More calls have no effect."""
        self._finalizer()
