"""The space of one tier: which pages are used by which copy, and when to evict."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ragcache_cachestore.storage.disk_cipher import EncryptionParams
from ragcache_core.eviction import EvictionPolicy
from ragcache_core.identity.keys import VariantKey
from ragcache_core.sizing import LOW_WATERMARK
from ragcache_core.storage.extents import PAGE_BYTES, Extent, ExtentAllocator


@dataclass(slots=True, eq=False)
class TierCopy:
    """One copy of a value in one tier.

    Attributes:
        encryption: Of an encrypted copy on disk. None: the copy is plain.
        ref_count: The variant, each lease and each task that moves the bytes count as one
            reference. The pages are freed with the last reference, so no write overwrites bytes
            that a client reads.
    """

    extents: tuple[Extent, ...]
    num_bytes: int
    ref_count: int = 1
    encryption: EncryptionParams | None = None

    @property
    def in_use(self) -> bool:
        """Whether a lease or a task refers to the copy, besides its variant."""
        return self.ref_count > 1


class TierSpace:
    """The pages and the eviction policy of one tier. The store's lock guards it.

    Args:
        high: Watermark as a share of the capacity. Above it, the sweeper evicts.
        low: Watermark down to which the sweeper evicts, so that a put seldom waits for pages.
    """

    def __init__(
        self,
        allocator: ExtentAllocator,
        policy: EvictionPolicy[VariantKey],
        *,
        high: float = 0.95,
        low: float = LOW_WATERMARK,
    ) -> None:
        if not 0.0 < low <= high <= 1.0:
            raise ValueError("the watermarks must satisfy 0 < low <= high <= 1")
        self.allocator = allocator
        self.policy = policy
        # Rounded up, because a tier of a few pages has no page between the watermarks.
        self._high_pages = math.ceil(allocator.num_pages * high)
        self._low_pages = math.ceil(allocator.num_pages * low)

    @property
    def capacity_bytes(self) -> int:
        """Bound of the bytes in the tier."""
        return self.allocator.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all copies."""
        return self.allocator.used_bytes

    def allocate(self, num_bytes: int) -> TierCopy | None:
        """Allocate pages for a copy. Return None if there are not enough."""
        extents = self.allocator.allocate(num_bytes)
        return None if extents is None else TierCopy(extents, num_bytes)

    def release(self, copy: TierCopy) -> bool:
        """Remove one reference. Return whether it was the last one and the pages are free."""
        copy.ref_count -= 1
        if copy.ref_count:
            return False
        self.allocator.free(copy.extents)
        return True

    def excess_pages(self) -> int:
        """Return the pages to evict now: down to low if the tier is above high, else 0."""
        used = self.allocator.used_pages
        return used - self._low_pages if used > self._high_pages else 0

    def missing_pages(self, num_bytes: int) -> int:
        """Return the pages to free before num_bytes can be allocated."""
        return self.allocator.missing_pages(num_bytes)


def num_pages(num_bytes: int) -> int:
    """Return the pages that a value of num_bytes takes. Small values share a page."""
    return -(-num_bytes // PAGE_BYTES)
