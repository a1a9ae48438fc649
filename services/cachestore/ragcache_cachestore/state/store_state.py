"""The books of a store: what is held, where, who needs it, and what must go. No bytes, no disk.

Everything here is under the store's lock and takes microseconds. What has to happen outside of it
is left for others to find: copies on disk that were given up (``graves``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from ragcache_cachestore.state.catalog import Catalog, Holding
from ragcache_cachestore.state.event_feed import Feed
from ragcache_cachestore.state.leases import Leases
from ragcache_cachestore.state.miss_reasons import Misses
from ragcache_cachestore.state.pins import Pins
from ragcache_cachestore.state.tombstones import Tombstones
from ragcache_cachestore.storage.tier_space import Copy, Shelf, num_pages
from ragcache_cachestore.telemetry.counters import Counters
from ragcache_cachestore.telemetry.exporter import Telemetry
from ragcache_core.cost.tier_latency import LoadModel
from ragcache_core.eviction.admission import Admission
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, Part, Tier, VariantInfo
from ragcache_core.store_api import AsOf, EventKind, Held, Variants, Want

PINNED_SHARE = 0.5
"""Share of memory whose worth of values may be pinned."""

CLOCKS_DIFFER_MS = 2000
"""How far the clock of whoever plans a computation may be ahead of the store's."""


@dataclass(frozen=True, slots=True)
class Grave:
    """A copy on disk that nothing refers to any more, save perhaps its record."""

    key: VariantKey
    copy: Copy


class Books:
    """One store's books.

    lock: guards all of this. room: notified when pages of memory may have become free.
    arriving_bytes: of values on their way in, which nobody may evict. quiet: copies in memory that
    rest until a time, where a writer may not have noticed that he is to stop. served: bytes since
    they were last taken.
    """

    def __init__(
        self,
        memory: Shelf,
        disk: Shelf,
        admission: Admission[VariantKey],
        policy_name: str,
        store_id: bytes,
        clock: Callable[[], float],
        telemetry: Telemetry,
    ) -> None:
        self.lock = threading.Lock()
        self.room = threading.Condition(self.lock)
        self.clock = clock
        self.telemetry = telemetry
        self.policy_name = policy_name
        self.store_id = store_id
        self.memory = memory
        self.disk = disk
        self.admission = admission
        self.load_models = {
            Tier.MEMORY: LoadModel(latency_s=200e-6, bytes_per_s=4e9),
            Tier.DISK: LoadModel(latency_s=500e-6, bytes_per_s=1e9),
        }
        self.catalog = Catalog()
        self.leases = Leases()
        self.pins = Pins(int(memory.capacity_bytes * PINNED_SHARE))
        self.misses = Misses()
        self.tombstones = Tombstones()
        self.counters = Counters()
        self.feed = Feed()
        self.arriving_bytes = 0
        self.next_identity = 1
        self.graves: list[Grave] = []
        self._grave_pages = 0
        self.quiet: list[tuple[float, Copy]] = []
        self.replicas: dict[VariantKey, tuple[str, ...]] = {}
        self.served: dict[VariantKey, int] = {}

    def tier(self, tier: Tier) -> Shelf:
        """Books of a tier."""
        return self.memory if tier is Tier.MEMORY else self.disk

    def look(self, want: Want, exact: bool, domain: str) -> Variants:
        """The answer to a want."""
        if want.prefix is not None:
            key = VariantKey(want.chunk, want.prefix)
            holding = self.catalog.get(key)
            found = [] if holding is None else [holding]
            none = self.why(key) if holding is None else None
        else:
            found = self.catalog.variants_of(want.chunk)
            none = self.misses.why_none_of(want.chunk)
        refusals = [refusal(one, exact, domain) for one in found]
        held = tuple(
            [
                self._held(one, every=want.prefix is None)
                for one, refusal in zip(found, refusals, strict=True)
                if refusal is None
            ]
        )
        return Variants(held) if held else Variants((), refusals[0] if found else none)

    def _held(self, holding: Holding, *, every: bool) -> Held:
        return Held(
            key=holding.key,
            info=holding.info,
            tier=holding.tier,
            load_s=self.load_models[holding.tier].predict(holding.info.num_bytes),
            prefix_chunks=holding.origin.prefix_chunks if every else (),
            replicas=self.replicas.get(holding.key, ()),
            wanted_better=holding.wanted_better,
        )

    def why(self, key: VariantKey) -> Miss:
        """Why a variant is not held, as far as is remembered."""
        if self.tombstones.names(key):
            return Miss.DELETED
        return self.misses.why(key)

    @staticmethod
    def best(holding: Holding) -> tuple[Tier, Copy]:
        """The fastest copy of a variant."""
        if holding.memory is not None:
            return Tier.MEMORY, holding.memory
        assert holding.disk is not None
        return Tier.DISK, holding.disk

    def promotable(self, holding: Holding) -> bool:
        """Whether a value read from disk is to come into memory: deserved, or room is free."""
        free = not self.memory.lacking_pages(holding.info.num_bytes)
        return holding.deserves_memory or (free and not self.memory.excess_pages())

    def admitted(self, holding: Holding, now: float) -> bool:
        """Whether a value that is only in memory is worth writing to disk."""
        if holding.info.num_bytes > self.disk.capacity_bytes:
            return False
        worth_of_cheapest = None
        if self.disk_pages_for(holding.info.num_bytes):
            cheapest = self.disk.policy.cheapest(self._may_leave_disk)
            if cheapest is not None:
                worth_of_cheapest = self.disk.policy.worth(cheapest, now)
        return self.admission.admits(holding.key, holding.candidate, now, worth_of_cheapest)

    def install(
        self, holding: Holding, held: Holding | None, now: float, *, used: bool = True
    ) -> None:
        """Hold a new record, in the place of held. used: whether that counts as a use."""
        key = holding.key
        if held is not None:
            self._replace(held, holding)
        self.catalog.add(holding)
        for tier, copy in ((self.memory, holding.memory), (self.disk, holding.disk)):
            if copy is None:
                continue
            if used or key not in tier.policy:
                tier.policy.add(key, holding.candidate, now)
            else:
                tier.policy.resize(key, holding.candidate)
        kind = EventKind.STORED if held is None else EventKind.REPLACED
        self.feed.publish(kind, key, holding.tier, holding.info)

    def _replace(self, held: Holding, by: Holding) -> None:
        """Hold held no more; what it has on disk stays until the new one has its own."""
        self.catalog.remove(held)
        self._cancel(held)
        if held.memory is not None:
            if by.memory is None:
                self.memory.policy.remove(held.key)
            self.memory.let_go(held.memory)
            held.memory = None
        if held.disk is not None and by.disk is None:
            self.disk.policy.remove(held.key)
        by.superseded = held.superseded if held.disk is None else held
        held.superseded = None
        if by.disk is not None:
            self.bury_superseded(by)

    def bury_superseded(self, holding: Holding) -> None:
        """A holding has a copy on disk: what it replaced there is not needed any more."""
        older, holding.superseded = holding.superseded, None
        if older is not None:
            assert older.disk is not None
            self.give_up(older.key, older.disk)
            older.disk = None

    def _reinstate(self, holding: Holding) -> bool:
        """Hold again what a holding without copies replaced, as a restart would; False if none."""
        older = holding.superseded
        if older is None or self.tombstones.covers(older.key, older.origin, older.delete_sequence):
            return False
        holding.superseded = None
        self.catalog.remove(holding)
        self._cancel(holding)
        older.continues(holding)
        self.catalog.add(older)
        self.disk.policy.add(older.key, older.candidate, self.clock())
        self.feed.publish(EventKind.REPLACED, older.key, Tier.DISK, older.info)
        return True

    def lose_from_memory(self, holding: Holding, reason: Miss) -> None:
        """Its copy in memory is gone, and out of the policy: hold what is left of it."""
        assert holding.memory is not None
        self.memory.let_go(holding.memory)
        holding.memory = None
        if holding.disk is not None:
            self.feed.publish(EventKind.MOVED, holding.key, Tier.DISK, holding.info)
        elif not self._reinstate(holding):
            self.drop(holding, reason)

    def drop(self, holding: Holding, reason: Miss) -> None:
        """Hold a variant no more, in any tier."""
        key = holding.key
        self.catalog.remove(holding)
        self._cancel(holding)
        if holding.memory is not None:
            self.memory.policy.remove(key)
            self.memory.let_go(holding.memory)
            holding.memory = None
        if holding.disk is not None:
            self.disk.policy.remove(key)
            self.give_up(key, holding.disk)
            holding.disk = None
        self.bury_superseded(holding)
        self.pins.unpin(key)
        self.replicas.pop(key, None)
        self.misses.note(key, reason)
        self.feed.publish(EventKind.DROPPED, key, None, holding.info)

    @staticmethod
    def _cancel(holding: Holding) -> None:
        if holding.job is not None:
            holding.job.done.cancel()  # of no effect on one that runs: it notices by itself
            holding.job = None

    def evict_from_memory(self, pages: int, *, unwritten: bool = False) -> None:
        """Take copies out of memory until so many pages are free or none may go.

        unwritten: also those that are still to be written, which then are lost.
        """

        def may(key: VariantKey) -> bool:
            holding = self.catalog.get(key)
            assert holding is not None
            assert holding.memory is not None
            if holding.memory.in_use or key in self.pins:
                return False
            goes = holding.disk is None and holding.superseded is None
            if goes and self._has_children(self.disk, key):
                return False
            return holding.job is None or (unwritten and not holding.job.urgent)

        end = self.memory.allocator.used_pages - pages
        while self.memory.allocator.used_pages > end:
            key = self.memory.policy.evict(may)
            if key is None:
                return
            holding = self.catalog.get(key)
            assert holding is not None
            assert holding.memory is not None
            self._count_eviction(Tier.MEMORY, holding)
            holding.note_taken()
            self.lose_from_memory(holding, Miss.EVICTED)

    def evict_from_disk(self, pages: int) -> bool:
        """Give up copies on disk for so many pages; False if none may go."""
        freed = 0
        while freed < pages:
            key = self.disk.policy.evict(self._may_leave_disk)
            if key is None:
                break
            holding = self.catalog.get(key)
            assert holding is not None
            assert holding.disk is not None
            self._count_eviction(Tier.DISK, holding)
            freed += num_pages(holding.disk.num_bytes)
            self.give_up(key, holding.disk)
            holding.disk = None
            if holding.memory is None:
                self.drop(holding, Miss.EVICTED)
        return freed > 0

    def _may_leave_disk(self, key: VariantKey) -> bool:
        holding = self.catalog.get(key)
        assert holding is not None
        assert holding.disk is not None
        if holding.memory is None and self._has_children(self.memory, key):
            return False
        return not holding.disk.in_use and key not in self.pins

    def needed_on_disk(self, key: VariantKey) -> bool:
        """Whether a child on disk keeps key from going for good, so that it is to be there, too."""
        return self._has_children(self.disk, key)

    @staticmethod
    def _has_children(tier: Shelf, key: VariantKey) -> bool:
        """Whether a tier has a child of key that needs it: then key does not go for good."""
        return tier.policy.leaves_only and not tier.policy.is_leaf(key)

    def give_up(self, key: VariantKey, copy: Copy) -> None:
        """Nothing refers to a copy on disk any more: its record and its pages are to go."""
        self.graves.append(Grave(key, copy))
        self._grave_pages += num_pages(copy.num_bytes)

    def buried(self, count: int) -> bool:
        """The records of the first graves are gone; whether any pages came free by that."""
        done = self.graves[:count]
        del self.graves[:count]
        self._grave_pages -= sum([num_pages(grave.copy.num_bytes) for grave in done])
        return sum([self.disk.let_go(grave.copy) for grave in done]) > 0

    def disk_pages_to_evict(self) -> int:
        """Pages of copies on disk to give up now, beside what is given up already."""
        excess = self.disk.excess_pages()
        return max(0, excess - self._grave_pages) if excess else 0

    def disk_pages_for(self, num_bytes: int) -> int:
        """Pages of copies on disk to give up before num_bytes can be placed."""
        lacking = self.disk.lacking_pages(num_bytes)
        return max(0, lacking - self._grave_pages) if lacking else 0

    def _count_eviction(self, tier: Tier, holding: Holding) -> None:
        self.counters.evictions[tier] += 1
        self.telemetry.evicted(tier, self.policy_name, holding.info.num_bytes)

    def expire(self) -> None:
        """End leases, pins and rests whose time is over."""
        now = self.clock()
        for lease in self.leases.expire(now):
            self.tier(lease.tier).let_go(lease.copy)
        self.pins.expire(now)
        for until, copy in self.quiet:
            if until <= now:
                self.memory.let_go(copy)
        self.quiet = [item for item in self.quiet if item[0] > now]

    def swappable(self, key: VariantKey, identity: int) -> Holding | None:
        """A record that may be swapped for another encoding: held, at rest, and read by nobody."""
        holding = self.catalog.get(key)
        if holding is None or holding.identity != identity or holding.job is not None:
            return None
        copies = [copy for copy in (holding.memory, holding.disk) if copy is not None]
        return None if any(copy.in_use for copy in copies) else holding

    def successor(self, old: Holding, info: VariantInfo, parts: tuple[Part, ...]) -> Holding:
        """A record of the same variant in another encoding, not installed yet."""
        holding = Holding(
            key=old.key,
            identity=self.next_identity,
            info=info,
            parts=parts,
            origin=old.origin,
            shape=old.shape,
            value_format=old.value_format,
            delete_sequence=old.delete_sequence,
            put_at=old.put_at,
            wanted_better=old.wanted_better,
        )
        self.next_identity += 1
        holding.continues(old)
        return holding

    def seen(self, as_of: AsOf) -> int:
        """The last delete that a computation has seen."""
        if as_of.store != self.store_id:
            return 0
        seen = min(as_of.sequence, self.tombstones.last_sequence)
        if as_of.planned_at_ms:
            applied_by = self.tombstones.applied_by(as_of.planned_at_ms - CLOCKS_DIFFER_MS)
            seen = min(seen, applied_by)
        return seen

    def check(self) -> None:
        """Raise AssertionError if the books do not balance. For tests, while nothing else runs."""
        self.catalog.check()
        for tier in (self.memory, self.disk):
            tier.policy.check()
            tier.allocator.check()
            assert tier.used_bytes <= tier.capacity_bytes
        for holding in self.catalog:
            assert holding.memory is not None or holding.disk is not None
            assert (holding.memory is not None) == (holding.key in self.memory.policy)
            assert (holding.disk is not None) == (holding.key in self.disk.policy)
        pages = [num_pages(grave.copy.num_bytes) for grave in self.graves]
        assert self._grave_pages == sum(pages)
        assert len(self.memory.policy) + len(self.disk.policy) == sum(
            [(one.memory is not None) + (one.disk is not None) for one in self.catalog]
        )


def refusal(holding: Holding, exact: bool, domain: str) -> Miss | None:
    """Why a variant that is held may not serve; None if it may."""
    if domain and holding.origin.domain != domain:
        return Miss.OTHER_DOMAIN
    if exact and not holding.info.provenance.exact:
        return Miss.TAINTED
    if exact and not holding.info.precision.lossless:
        return Miss.OTHER_PRECISION
    return None
