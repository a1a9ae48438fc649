"""One tier: which copies of values lie where in its file, and how much room is left."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ragcache_core.eviction import EvictionPolicy
from ragcache_core.identity.keys import VariantKey
from ragcache_core.storage.extents import PAGE_BYTES, Extent, ExtentAllocator


@dataclass(slots=True, eq=False)
class TierCopy:
    """One copy of a value in one tier.

    holds: who needs its pages to stay as they are: its variant, each lease, whoever moves it. The
    pages are free again when the last of them lets go, so nothing that is read is overwritten.
    """

    extents: tuple[Extent, ...]
    num_bytes: int
    ref_count: int = 1

    @property
    def in_use(self) -> bool:
        """Whether somebody beside its variant needs it."""
        return self.ref_count > 1


class TierSpace:
    """One tier: copies within a capacity. Under the store's lock; holds no bytes itself.

    high, low: watermarks, as shares of the capacity. Past high, whoever looks after the tier evicts
    down to low, so that a put seldom has to wait for room.
    """

    def __init__(
        self,
        allocator: ExtentAllocator,
        policy: EvictionPolicy[VariantKey],
        *,
        high: float = 0.95,
        low: float = 0.90,
    ) -> None:
        if not 0.0 < low <= high <= 1.0:
            raise ValueError("0 < low <= high <= 1")
        self.allocator = allocator
        self.policy = policy
        # Rounded up: a few large pages leave no room between the marks.
        self._high_pages = math.ceil(allocator.num_pages * high)
        self._low_pages = math.ceil(allocator.num_pages * low)

    @property
    def capacity_bytes(self) -> int:
        """Bound of the bytes in it."""
        return self.allocator.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all copies."""
        return self.allocator.used_bytes

    def allocate(self, num_bytes: int) -> TierCopy | None:
        """Room for a copy; None if there is not enough of it."""
        extents = self.allocator.allocate(num_bytes)
        return None if extents is None else TierCopy(extents, num_bytes)

    def release(self, copy: TierCopy) -> bool:
        """One hold less. Returns whether that was the last and its pages are free."""
        copy.ref_count -= 1
        if copy.ref_count:
            return False
        self.allocator.free(copy.extents)
        return True

    def excess_pages(self) -> int:
        """Pages to evict now: down to low once past high, else 0."""
        used = self.allocator.used_pages
        return used - self._low_pages if used > self._high_pages else 0

    def lacking_pages(self, num_bytes: int) -> int:
        """Pages to free before num_bytes can be placed."""
        free = self.allocator.num_pages - self.allocator.used_pages
        return max(0, num_pages(num_bytes) - free)


def num_pages(num_bytes: int) -> int:
    """Pages that a value of num_bytes takes."""
    return -(-num_bytes // PAGE_BYTES)
