"""The state of a store: what is held, where, who needs it, and what must go. No bytes, no disk.

Everything here is under the store's lock and takes microseconds. What has to happen outside of it
is left for others to find: copies on disk that were given up (``dropped_copies``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from ragcache_cachestore.state.catalog import Catalog, CatalogVariant
from ragcache_cachestore.state.event_feed import EventFeed
from ragcache_cachestore.state.leases import Leases
from ragcache_cachestore.state.miss_reasons import MissReasons
from ragcache_cachestore.state.pins import Pins
from ragcache_cachestore.state.tombstones import Tombstones
from ragcache_cachestore.storage.tier_space import TierCopy, TierSpace, num_pages
from ragcache_cachestore.telemetry.counters import Counters
from ragcache_cachestore.telemetry.exporter import Telemetry
from ragcache_core.cost.tier_latency import TierLatency
from ragcache_core.eviction.admission import Admission
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, Tier, ValuePart, VariantInfo
from ragcache_core.store_api import AsOf, ChunkVariants, EventKind, LookupKey, StoredVariant

PINNED_SHARE = 0.5
"""Share of memory whose worth of values may be pinned."""

MAX_CLOCK_SKEW_MS = 2000
"""How far the clock of whoever plans a computation may be ahead of the store's."""


@dataclass(frozen=True, slots=True)
class DroppedCopy:
    """A copy on disk that nothing refers to any more, save perhaps its record."""

    key: VariantKey
    copy: TierCopy


class StoreState:
    """One store's state.

    lock: guards all of this. room: notified when pages of memory may have become free.
    incoming_bytes: of values on their way in, which nobody may evict. quiet: copies in memory that
    rest until a time, where a writer may not have noticed that he is to stop. served: bytes since
    they were last taken.
    """

    def __init__(
        self,
        memory: TierSpace,
        disk: TierSpace,
        admission: Admission[VariantKey],
        policy_name: str,
        store_id: bytes,
        clock: Callable[[], float],
        telemetry: Telemetry,
    ) -> None:
        self.lock = threading.Lock()
        self.memory_freed = threading.Condition(self.lock)
        self.clock = clock
        self.telemetry = telemetry
        self.policy_name = policy_name
        self.store_id = store_id
        self.memory = memory
        self.disk = disk
        self.admission = admission
        self.load_models = {
            Tier.MEMORY: TierLatency(latency_s=200e-6, bytes_per_s=4e9),
            Tier.DISK: TierLatency(latency_s=500e-6, bytes_per_s=1e9),
        }
        self.catalog = Catalog()
        self.leases = Leases()
        self.pins = Pins(int(memory.capacity_bytes * PINNED_SHARE))
        self.misses = MissReasons()
        self.tombstones = Tombstones()
        self.counters = Counters()
        self.feed = EventFeed()
        self.incoming_bytes = 0
        self.next_identity = 1
        self.dropped_copies: list[DroppedCopy] = []
        self._dropped_pages = 0
        self.quarantined: list[tuple[float, TierCopy]] = []
        self.replicas: dict[VariantKey, tuple[str, ...]] = {}
        self.served: dict[VariantKey, int] = {}

    def tier(self, tier: Tier) -> TierSpace:
        """StoreState of a tier."""
        return self.memory if tier is Tier.MEMORY else self.disk

    def lookup(self, want: LookupKey, exact: bool, domain: str) -> ChunkVariants:
        """The answer to a want."""
        if want.prefix is not None:
            key = VariantKey(want.chunk, want.prefix)
            variant = self.catalog.get(key)
            found = [] if variant is None else [variant]
            none = self.miss_reason(key) if variant is None else None
        else:
            found = self.catalog.variants_of(want.chunk)
            none = self.misses.chunk_miss_reason(want.chunk)
        refusals = [refusal(one, exact, domain) for one in found]
        held = tuple(
            [
                self._held(one, every=want.prefix is None)
                for one, refusal in zip(found, refusals, strict=True)
                if refusal is None
            ]
        )
        return ChunkVariants(held) if held else ChunkVariants((), refusals[0] if found else none)

    def _held(self, variant: CatalogVariant, *, every: bool) -> StoredVariant:
        return StoredVariant(
            key=variant.key,
            info=variant.info,
            tier=variant.tier,
            load_s=self.load_models[variant.tier].predict(variant.info.num_bytes),
            prefix_chunks=variant.origin.prefix_chunks if every else (),
            replicas=self.replicas.get(variant.key, ()),
            wants_higher_precision=variant.wants_higher_precision,
        )

    def miss_reason(self, key: VariantKey) -> Miss:
        """Why a variant is not held, as far as is remembered."""
        if self.tombstones.names(key):
            return Miss.DELETED
        return self.misses.miss_reason(key)

    @staticmethod
    def fastest_copy(variant: CatalogVariant) -> tuple[Tier, TierCopy]:
        """The fastest copy of a variant."""
        if variant.memory is not None:
            return Tier.MEMORY, variant.memory
        assert variant.disk is not None
        return Tier.DISK, variant.disk

    def should_promote(self, variant: CatalogVariant) -> bool:
        """Whether a value read from disk is to come into memory: deserved, or room is free."""
        free = not self.memory.lacking_pages(variant.info.num_bytes)
        return variant.deserves_memory or (free and not self.memory.excess_pages())

    def should_write(self, variant: CatalogVariant, now: float) -> bool:
        """Whether a value that is only in memory is worth writing to disk."""
        if variant.info.num_bytes > self.disk.capacity_bytes:
            return False
        victim_priority = None
        if self.disk_pages_for(variant.info.num_bytes):
            cheapest = self.disk.policy.advance_to_victim(self._may_leave_disk)
            if cheapest is not None:
                victim_priority = self.disk.policy.priority(cheapest, now)
        return self.admission.admits(variant.key, variant.eviction_candidate, now, victim_priority)

    def install(
        self, variant: CatalogVariant, held: CatalogVariant | None, now: float, *, used: bool = True
    ) -> None:
        """Hold a new record, in the place of held. used: whether that counts as a use."""
        key = variant.key
        if held is not None:
            self._replace(held, variant)
        self.catalog.add(variant)
        for tier, copy in ((self.memory, variant.memory), (self.disk, variant.disk)):
            if copy is None:
                continue
            if used or key not in tier.policy:
                tier.policy.add(key, variant.eviction_candidate, now)
            else:
                tier.policy.resize(key, variant.eviction_candidate)
        kind = EventKind.STORED if held is None else EventKind.REPLACED
        self.feed.publish(kind, key, variant.tier, variant.info)

    def _replace(self, held: CatalogVariant, by: CatalogVariant) -> None:
        """Hold held no more; what it has on disk stays until the new one has its own."""
        self.catalog.remove(held)
        self._cancel(held)
        if held.memory is not None:
            if by.memory is None:
                self.memory.policy.remove(held.key)
            self.memory.release(held.memory)
            held.memory = None
        if held.disk is not None and by.disk is None:
            self.disk.policy.remove(held.key)
        by.superseded = held.superseded if held.disk is None else held
        held.superseded = None
        if by.disk is not None:
            self.drop_superseded(by)

    def drop_superseded(self, variant: CatalogVariant) -> None:
        """A variant has a copy on disk: what it replaced there is not needed any more."""
        older, variant.superseded = variant.superseded, None
        if older is not None:
            assert older.disk is not None
            self.drop_disk_copy(older.key, older.disk)
            older.disk = None

    def _restore_superseded(self, variant: CatalogVariant) -> bool:
        """Hold again what a variant without copies replaced, as a restart would; False if none."""
        older = variant.superseded
        if older is None or self.tombstones.covers(older.key, older.origin, older.delete_sequence):
            return False
        variant.superseded = None
        self.catalog.remove(variant)
        self._cancel(variant)
        older.inherit_use(variant)
        self.catalog.add(older)
        self.disk.policy.add(older.key, older.eviction_candidate, self.clock())
        self.feed.publish(EventKind.REPLACED, older.key, Tier.DISK, older.info)
        return True

    def remove_from_memory(self, variant: CatalogVariant, reason: Miss) -> None:
        """Its copy in memory is gone, and out of the policy: hold what is left of it."""
        assert variant.memory is not None
        self.memory.release(variant.memory)
        variant.memory = None
        if variant.disk is not None:
            self.feed.publish(EventKind.MOVED, variant.key, Tier.DISK, variant.info)
        elif not self._restore_superseded(variant):
            self.drop(variant, reason)

    def drop(self, variant: CatalogVariant, reason: Miss) -> None:
        """Hold a variant no more, in any tier."""
        key = variant.key
        self.catalog.remove(variant)
        self._cancel(variant)
        if variant.memory is not None:
            self.memory.policy.remove(key)
            self.memory.release(variant.memory)
            variant.memory = None
        if variant.disk is not None:
            self.disk.policy.remove(key)
            self.drop_disk_copy(key, variant.disk)
            variant.disk = None
        self.drop_superseded(variant)
        self.pins.unpin(key)
        self.replicas.pop(key, None)
        self.misses.note(key, reason)
        self.feed.publish(EventKind.DROPPED, key, None, variant.info)

    @staticmethod
    def _cancel(variant: CatalogVariant) -> None:
        if variant.job is not None:
            variant.job.done.cancel()  # of no effect on one that runs: it notices by itself
            variant.job = None

    def evict_from_memory(self, pages: int, *, unwritten: bool = False) -> None:
        """Take copies out of memory until so many pages are free or none may go.

        unwritten: also those that are still to be written, which then are lost.
        """

        def may(key: VariantKey) -> bool:
            variant = self.catalog.get(key)
            assert variant is not None
            assert variant.memory is not None
            if variant.memory.in_use or key in self.pins:
                return False
            goes = variant.disk is None and variant.superseded is None
            if goes and self._has_children(self.disk, key):
                return False
            return variant.job is None or (unwritten and not variant.job.urgent)

        end = self.memory.allocator.used_pages - pages
        while self.memory.allocator.used_pages > end:
            key = self.memory.policy.evict(may)
            if key is None:
                return
            variant = self.catalog.get(key)
            assert variant is not None
            assert variant.memory is not None
            self._count_eviction(Tier.MEMORY, variant)
            variant.note_demoted()
            self.remove_from_memory(variant, Miss.EVICTED)

    def evict_from_disk(self, pages: int) -> bool:
        """Give up copies on disk for so many pages; False if none may go."""
        freed = 0
        while freed < pages:
            key = self.disk.policy.evict(self._may_leave_disk)
            if key is None:
                break
            variant = self.catalog.get(key)
            assert variant is not None
            assert variant.disk is not None
            self._count_eviction(Tier.DISK, variant)
            freed += num_pages(variant.disk.num_bytes)
            self.drop_disk_copy(key, variant.disk)
            variant.disk = None
            if variant.memory is None:
                self.drop(variant, Miss.EVICTED)
        return freed > 0

    def _may_leave_disk(self, key: VariantKey) -> bool:
        variant = self.catalog.get(key)
        assert variant is not None
        assert variant.disk is not None
        if variant.memory is None and self._has_children(self.memory, key):
            return False
        return not variant.disk.in_use and key not in self.pins

    def needed_on_disk(self, key: VariantKey) -> bool:
        """Whether a child on disk keeps key from going for good, so that it is to be there, too."""
        return self._has_children(self.disk, key)

    @staticmethod
    def _has_children(tier: TierSpace, key: VariantKey) -> bool:
        """Whether a tier has a child of key that needs it: then key does not go for good."""
        return tier.policy.leaves_only and not tier.policy.is_leaf(key)

    def drop_disk_copy(self, key: VariantKey, copy: TierCopy) -> None:
        """Nothing refers to a copy on disk any more: its record and its pages are to go."""
        self.dropped_copies.append(DroppedCopy(key, copy))
        self._dropped_pages += num_pages(copy.num_bytes)

    def release_dropped_copies(self, count: int) -> bool:
        """The records of the first dropped_copies are gone; whether any pages came free by that."""
        done = self.dropped_copies[:count]
        del self.dropped_copies[:count]
        self._dropped_pages -= sum([num_pages(dropped.copy.num_bytes) for dropped in done])
        return sum([self.disk.release(dropped.copy) for dropped in done]) > 0

    def disk_pages_to_evict(self) -> int:
        """Pages of copies on disk to give up now, beside what is given up already."""
        excess = self.disk.excess_pages()
        return max(0, excess - self._dropped_pages) if excess else 0

    def disk_pages_for(self, num_bytes: int) -> int:
        """Pages of copies on disk to give up before num_bytes can be placed."""
        lacking = self.disk.lacking_pages(num_bytes)
        return max(0, lacking - self._dropped_pages) if lacking else 0

    def _count_eviction(self, tier: Tier, variant: CatalogVariant) -> None:
        self.counters.evictions[tier] += 1
        self.telemetry.evicted(tier, self.policy_name, variant.info.num_bytes)

    def expire(self) -> None:
        """End leases, pins and rests whose time is over."""
        now = self.clock()
        for lease in self.leases.expire(now):
            self.tier(lease.tier).release(lease.copy)
        self.pins.expire(now)
        for until, copy in self.quarantined:
            if until <= now:
                self.memory.release(copy)
        self.quarantined = [item for item in self.quarantined if item[0] > now]

    def find_swappable(self, key: VariantKey, identity: int) -> CatalogVariant | None:
        """A record that may be swapped for another encoding: held, at rest, and read by nobody."""
        variant = self.catalog.get(key)
        if variant is None or variant.identity != identity or variant.job is not None:
            return None
        copies = [copy for copy in (variant.memory, variant.disk) if copy is not None]
        return None if any(copy.in_use for copy in copies) else variant

    def make_successor(self, old: CatalogVariant, info: VariantInfo, parts: tuple[ValuePart, ...]) -> CatalogVariant:
        """A record of the same variant in another encoding, not installed yet."""
        variant = CatalogVariant(
            key=old.key,
            identity=self.next_identity,
            info=info,
            parts=parts,
            origin=old.origin,
            shape=old.shape,
            value_format=old.value_format,
            delete_sequence=old.delete_sequence,
            put_at=old.put_at,
            wants_higher_precision=old.wants_higher_precision,
        )
        self.next_identity += 1
        variant.inherit_use(old)
        return variant

    def last_seen_delete(self, as_of: AsOf) -> int:
        """The last delete that a computation has seen."""
        if as_of.store != self.store_id:
            return 0
        seen = min(as_of.sequence, self.tombstones.last_sequence)
        if as_of.planned_at_ms:
            applied_by = self.tombstones.applied_by(as_of.planned_at_ms - MAX_CLOCK_SKEW_MS)
            seen = min(seen, applied_by)
        return seen

    def check(self) -> None:
        """Raise AssertionError if the state do not balance. For tests, while nothing else runs."""
        self.catalog.check()
        for tier in (self.memory, self.disk):
            tier.policy.check()
            tier.allocator.check()
            assert tier.used_bytes <= tier.capacity_bytes
        for variant in self.catalog:
            assert variant.memory is not None or variant.disk is not None
            assert (variant.memory is not None) == (variant.key in self.memory.policy)
            assert (variant.disk is not None) == (variant.key in self.disk.policy)
        pages = [num_pages(dropped.copy.num_bytes) for dropped in self.dropped_copies]
        assert self._dropped_pages == sum(pages)
        assert len(self.memory.policy) + len(self.disk.policy) == sum(
            [(one.memory is not None) + (one.disk is not None) for one in self.catalog]
        )


def refusal(variant: CatalogVariant, exact: bool, domain: str) -> Miss | None:
    """Why a variant that is held may not serve; None if it may."""
    if domain and variant.origin.domain != domain:
        return Miss.OTHER_DOMAIN
    if exact and not variant.info.provenance.exact:
        return Miss.APPROXIMATE
    if exact and not variant.info.precision.lossless:
        return Miss.OTHER_PRECISION
    return None
