"""LeaseTable: promises that a copy stays in its tier while a client reads it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ragcache_cachestore.state.catalog import CatalogVariant
from ragcache_cachestore.storage.tier_space import TierCopy
from ragcache_core.identity.variant import Tier, ValueHeader
from ragcache_core.store_api import LEASE_S


@dataclass(frozen=True, slots=True)
class ReadLease:
    """A copy of a value that a client may read in its tier. The parts follow one another.

    Attributes:
        tier: Where the copy is.
        copy: In the memory tier or in the file of values.
        source: The tier that the value was in before this read. An encrypted value on disk is
            decrypted into memory, where the client reads it.
        expires_at: On the store's clock. A slower reader notices by the checksums.
    """

    id: int
    variant: CatalogVariant
    tier: Tier
    copy: TierCopy
    expires_at: float
    source: Tier

    @property
    def on_disk(self) -> bool:
        """Whether the copy is in the file of values."""
        return self.tier is Tier.DISK

    @property
    def header(self) -> ValueHeader:
        """What a client needs to read the value."""
        variant = self.variant
        return ValueHeader(
            variant.info,
            variant.parts,
            variant.shape,
            variant.value_format,
            self.source,
            variant.tag,
        )


class LeaseTable:
    """The open leases, ordered by the time at which they expire. The store's lock guards it."""

    def __init__(self) -> None:
        self._leases: OrderedDict[int, ReadLease] = OrderedDict()
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: object) -> bool:
        return lease_id in self._leases

    def grant(
        self,
        variant: CatalogVariant,
        tier: Tier,
        copy: TierCopy,
        now: float,
        source: Tier | None = None,
    ) -> ReadLease:
        """Add a lease, which counts as one reference to copy.

        Args:
            source: None: the tier of the copy.
        """
        copy.ref_count += 1
        lease = ReadLease(self._next_id, variant, tier, copy, now + LEASE_S, source or tier)
        self._next_id += 1
        self._leases[lease.id] = lease
        return lease

    def get(self, lease_id: int) -> ReadLease | None:
        """Return a lease that has not ended."""
        return self._leases.get(lease_id)

    def end(self, lease_id: int) -> ReadLease | None:
        """End a lease, whose copy the caller must release. Return None if it has ended before."""
        return self._leases.pop(lease_id, None)

    def expire(self, now: float) -> list[ReadLease]:
        """End every lease that has expired. The caller must release the copies."""
        expired = []
        while self._leases:
            lease = next(iter(self._leases.values()))
            if lease.expires_at > now:
                break
            del self._leases[lease.id]
            expired.append(lease)
        return expired
