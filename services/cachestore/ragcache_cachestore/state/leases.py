"""Leases: a promise that a copy stays as it is while somebody reads it, for some seconds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ragcache_cachestore.state.catalog import CatalogVariant
from ragcache_cachestore.storage.tier_space import TierCopy
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Origin, Tier, ValuePart, ValueShape, VariantInfo
from ragcache_core.storage.extents import Extent
from ragcache_core.store_api import LEASE_S


@dataclass(frozen=True, slots=True)
class Lease:
    """A copy of a value that may be read where it lies: extents of the memory_tier or of the file.

    The parts lie one after another. expires_at: on the store's clock; a reader that takes longer
    notices by the checksums.
    """

    id: int
    key: VariantKey
    info: VariantInfo
    parts: tuple[ValuePart, ...]
    shape: ValueShape | None
    value_format: int
    origin: Origin
    tier: Tier
    extents: tuple[Extent, ...]
    expires_at: float
    variant: CatalogVariant
    copy: TierCopy

    @property
    def on_disk(self) -> bool:
        """Whether the extents are of the file of values, not of the memory_tier."""
        return self.tier is Tier.DISK


class Leases:
    """Leases by id, in the order in which they expire. Under the store's lock."""

    def __init__(self) -> None:
        self._leases: OrderedDict[int, Lease] = OrderedDict()
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: object) -> bool:
        return lease_id in self._leases

    def grant(self, variant: CatalogVariant, tier: Tier, copy: TierCopy, now: float) -> Lease:
        """A lease of copy, which it holds from now on."""
        copy.ref_count += 1
        lease = Lease(
            id=self._next_id,
            key=variant.key,
            info=variant.info,
            parts=variant.parts,
            shape=variant.shape,
            value_format=variant.value_format,
            origin=variant.origin,
            tier=tier,
            extents=copy.extents,
            expires_at=now + LEASE_S,
            variant=variant,
            copy=copy,
        )
        self._next_id += 1
        self._leases[lease.id] = lease
        return lease

    def get(self, lease_id: int) -> Lease | None:
        """A lease that has not ended."""
        return self._leases.get(lease_id)

    def end(self, lease_id: int) -> Lease | None:
        """End a lease; its copy is the caller's to let go. None if it has ended before."""
        return self._leases.pop(lease_id, None)

    def expire(self, now: float) -> list[Lease]:
        """End every lease whose time is over; the copies are the caller's to let go."""
        over = []
        while self._leases:
            lease = next(iter(self._leases.values()))
            if lease.expires_at > now:
                break
            del self._leases[lease.id]
            over.append(lease)
        return over
