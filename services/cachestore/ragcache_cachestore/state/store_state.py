"""The state of a store: what is stored in which tier, who reads it, and what must be freed.

The store's lock guards all of it, and every call takes microseconds. It moves no bytes and does
not touch the disk. Copies on disk that were dropped wait in ``dropped_copies`` until the tier
mover removes their metadata and frees their pages.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ragcache_cachestore.state.catalog import Catalog, CatalogVariant, MissReasons
from ragcache_cachestore.state.leases import LeaseTable
from ragcache_cachestore.state.store_feed import StoreFeed
from ragcache_cachestore.state.tombstones import SteadyClock, Tombstones
from ragcache_cachestore.storage.tier_space import TierCopy, TierSpace, num_pages
from ragcache_cachestore.telemetry.exporter import Telemetry
from ragcache_core.cost.linear_fit import TierLatency
from ragcache_core.eviction import DEFAULT_POLICY
from ragcache_core.eviction.admission import Admission
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import NO_INFLUENCE, Miss, Tier, ValuePart, VariantInfo
from ragcache_core.storage.extents import PAGE_BYTES
from ragcache_core.store_api import (
    MAX_VARIANTS,
    AsOf,
    ChunkVariants,
    LookupKey,
    StoredVariant,
    Tombstone,
)
from ragcache_core.tiering.waiting_holds import HELD_SHARE, WaitingHolds
from ragcache_wire.watched.key_lines import DiskKeys

MAX_CLOCK_SKEW_MS = 2000
"""How far the clock of a gateway may be ahead of the store's."""

MAX_HOLD_S = 60.0
"""Longest time for which one hint holds a variant. A request that waits longer sends others."""

BATCH_VARIANTS = 256
"""Number of variants that are copied from the catalog at a time, so that no caller waits long."""

MAX_TOMBSTONE_BYTES = 64 << 20
"""Bound of the memory for tombstones: some 50,000 deletes of eight chunks."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The settings of a store.

    Attributes:
        memory_bytes: Capacity of the memory tier, which is never exceeded.
        disk_bytes: Capacity of the disk tier, which is never exceeded.
        owns_memory: Whether the store takes pages before its clients write to them.
        policy: Name of an eviction policy (``ragcache_core.eviction``).
        admission: Name of an admission policy for the disk tier.
        leaves_only: A parent outlives its children in a tier (``exact`` reuse).
        telemetry: Receives what happens.
        clock: Returns monotonic seconds.
        wall_ms: Returns the Unix time in milliseconds.
        free_bytes: Returns the free bytes of the folder's volume.
        max_tombstone_bytes: Bound of the memory for tombstones.
        disk_keys: Encrypt the values on disk. None: they are plain.
    """

    memory_bytes: int
    disk_bytes: int
    owns_memory: bool = False
    policy: str = DEFAULT_POLICY
    admission: str = "always"
    leaves_only: bool = False
    telemetry: Telemetry = field(default_factory=Telemetry)
    clock: Callable[[], float] = time.monotonic
    wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    free_bytes: Callable[[], int] | None = None
    max_tombstone_bytes: int = MAX_TOMBSTONE_BYTES
    disk_keys: DiskKeys | None = None


@dataclass(slots=True)
class Counters:
    """Counts since the start, and the connections now."""

    hits: Counter[Tier] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    evictions: Counter[str] = field(default_factory=Counter)
    bytes_by_transport: Counter[str] = field(default_factory=Counter)
    corrupt: int = 0
    puts: int = 0
    reported_uses: int = 0
    connections: int = 0
    connections_evicted: int = 0
    connections_refused: int = 0


@dataclass(frozen=True, slots=True)
class DroppedCopy:
    """A copy on disk that no variant refers to. Its metadata may still exist."""

    key: VariantKey
    copy: TierCopy


class StoreState:
    """The state of one store.

    Attributes:
        lock: Guards everything here but ``delete_lock``.
        delete_lock: Held while deletes are applied or forgotten. It is taken before ``lock``.
        steady: Dates deletes and plans.
        sweep_soon: Wakes the sweeper, because a tier is above its high watermark.
        memory_freed: Notified when pages of memory may have become free.
        incoming: Number of incoming puts by variant.
        incoming_bytes: Bytes of incoming values, which cannot be evicted.
        quarantined: Copies in memory whose pages stay reserved until a time, because a client
            may not have noticed yet that its put was aborted.
        holds: The variants that waiting requests need, which no tier evicts meanwhile.
        served: Bytes served by variant, until the replicator takes them.
    """

    def __init__(
        self,
        options: StoreOptions,
        memory: TierSpace,
        disk: TierSpace,
        admission: Admission[VariantKey],
        store_id: bytes,
    ) -> None:
        self.lock = threading.Lock()
        self.delete_lock = threading.Lock()
        self.memory_freed = threading.Condition(self.lock)
        self.sweep_soon = threading.Event()
        self.options = options
        self.clock = options.clock
        self.steady = SteadyClock(options.clock, options.wall_ms)
        self.telemetry = options.telemetry
        self.store_id = store_id
        self.memory = memory
        self.disk = disk
        self.admission = admission
        self.load_models = {
            Tier.MEMORY: TierLatency(latency_s=200e-6, bytes_per_s=4e9),
            Tier.DISK: TierLatency(latency_s=500e-6, bytes_per_s=1e9),
        }
        self.catalog = Catalog()
        self.leases = LeaseTable()
        self.misses = MissReasons()
        self.tombstones = Tombstones()
        # Sequence of the last delete before the one that is being applied. None: none is.
        self._deletes_before: int | None = None
        self.counters = Counters()
        self.feed = StoreFeed()
        self.incoming: Counter[VariantKey] = Counter()
        self.incoming_bytes = 0
        self.next_identity = 1
        self.dropped_copies: list[DroppedCopy] = []
        self._dropped_pages = 0
        self.quarantined: list[tuple[float, TierCopy]] = []
        self.copies: dict[VariantKey, tuple[str, ...]] = {}
        self.served: dict[VariantKey, int] = {}
        capacities = [tier.capacity_bytes for tier in (memory, disk) if tier.capacity_bytes]
        max_held_bytes = int(min(capacities, default=0) * HELD_SHARE)
        self.holds: WaitingHolds[VariantKey] = WaitingHolds(max_held_bytes)
        # When a reader that may use lossy values looked for any. None: never.
        self.lossy_lookup_at: float | None = None

    def tier(self, tier: Tier) -> TierSpace:
        """Return the space of a tier."""
        return self.memory if tier is Tier.MEMORY else self.disk

    def lookup(self, wanted: LookupKey, exact: bool, domain: str) -> ChunkVariants:
        """Return the stored variants of one lookup key that may serve, or why there are none."""
        named = None if wanted.prefix is None else VariantKey(wanted.chunk, wanted.prefix)
        miss: Miss | None = None
        if named is None or wanted.others:
            variants = self.catalog.variants_of(wanted.chunk)
            found = [variant for variant in variants if not self.is_deleted(variant)]
            miss = self.misses.of_chunk(wanted.chunk)
        else:
            variant = self.find(named)
            found = [] if variant is None else [variant]
            miss = self.miss_reason(named) if variant is None else None
        refusals = [refusal(variant, exact, domain) for variant in found]
        serving = [
            variant for variant, refused in zip(found, refusals, strict=True) if refused is None
        ]
        if not serving:
            return ChunkVariants((), refusals[0] if found else miss)
        return ChunkVariants(
            tuple(
                [
                    self._describe(variant, with_prefix=wanted.takes_any)
                    for variant in self._most_used(serving, named)
                ]
            )
        )

    def _most_used(
        self, variants: list[CatalogVariant], named: VariantKey | None
    ) -> list[CatalogVariant]:
        """Return at most MAX_VARIANTS variants: the named one, and then those used most."""
        if len(variants) <= MAX_VARIANTS:
            return variants
        now = self.clock()

        def rank(variant: CatalogVariant) -> tuple[bool, float, int]:
            return variant.key != named, -variant.decayed_uses(now), -variant.identity

        return heapq.nsmallest(MAX_VARIANTS, variants, key=rank)

    def _describe(self, variant: CatalogVariant, *, with_prefix: bool) -> StoredVariant:
        return StoredVariant(
            key=variant.key,
            info=variant.info,
            tier=variant.tier,
            load_s=self.load_models[variant.tier].predict(variant.info.num_bytes),
            prefix_chunks=variant.origin.prefix_chunks if with_prefix else (),
            copies=self.copies.get(variant.key, ()),
            wants_higher_precision=variant.wants_higher_precision,
            influence=variant.origin.influence if with_prefix else NO_INFLUENCE,
        )

    def miss_reason(self, key: VariantKey) -> Miss:
        """Return why ``find`` finds no variant."""
        if self.tombstones.names(key) or self.catalog.get(key) is not None:
            return Miss.DELETED
        return self.misses.of_variant(key)

    def find(self, key: VariantKey) -> CatalogVariant | None:
        """Return the variant of key, if it is stored and not deleted."""
        variant = self.catalog.get(key)
        return None if variant is None or self.is_deleted(variant) else variant

    def is_deleted(self, variant: CatalogVariant) -> bool:
        """Return whether the delete that is being applied covers a variant in the catalog."""
        if self._deletes_before is None:
            return False
        after = max(self._deletes_before, variant.delete_sequence)
        return self.tombstones.covers(variant.key, variant.origin, after)

    def begin_delete(self, tombstone: Tombstone) -> set[VariantKey]:
        """Have a delete take effect. Return the variants that the caller has to drop.

        Nothing that it covers is served from now on. The caller has the delete lock until
        ``end_delete``.
        """
        self._deletes_before = self.tombstones.last_sequence
        self.tombstones.add(tombstone, self.steady.now_ms())
        return self.catalog.covered_by(tombstone.deletion)

    def drop_deleted(self, keys: Iterable[VariantKey], reason: Miss) -> int:
        """Drop variants that ``begin_delete`` has returned. Return how many were still there."""
        num_dropped = 0
        for key in keys:
            variant = self.catalog.get(key)
            if variant is not None and self.is_deleted(variant):
                self.drop(variant, reason)
                num_dropped += 1
        self.memory_freed.notify_all()
        return num_dropped

    def end_delete(self) -> None:
        """Note that all variants are dropped that the delete covers."""
        self._deletes_before = None

    @staticmethod
    def fastest_copy(variant: CatalogVariant) -> tuple[Tier, TierCopy]:
        """Return the tier and the copy that a reader should use."""
        if variant.memory is not None:
            return Tier.MEMORY, variant.memory
        assert variant.disk is not None
        return Tier.DISK, variant.disk

    def should_promote(self, variant: CatalogVariant) -> bool:
        """Return whether a value that was read from disk should be copied into memory."""
        free = not self.memory.missing_pages(variant.info.num_bytes)
        return variant.deserves_memory or (free and not self.memory.excess_pages())

    def admit_to_disk(self, variant: CatalogVariant, now: float) -> bool:
        """Ask the admission policy whether to write a value that is only in memory to disk.

        The admission policy counts the question.
        """
        if variant.info.num_bytes > self.disk.capacity_bytes:
            return False
        victim_priority = None
        if self.disk_pages_for(variant.info.num_bytes):
            victim = self.disk.policy.advance_to_victim(self._may_leave_disk)
            if victim is not None:
                victim_priority = self.disk.policy.priority(victim, now)
        return self.admission.admits(variant.key, variant.eviction_candidate, now, victim_priority)

    def install(
        self,
        variant: CatalogVariant,
        replaced: CatalogVariant | None,
        now: float,
        *,
        used: bool = True,
    ) -> None:
        """Add a variant to the catalog, in place of another one.

        Args:
            used: Whether the eviction policies count this as a use.
        """
        key = variant.key
        if replaced is not None:
            self._replace(replaced, variant)
        self.catalog.add(variant)
        for tier, copy in ((self.memory, variant.memory), (self.disk, variant.disk)):
            if copy is None:
                continue
            if used or key not in tier.policy:
                tier.policy.add(key, variant.eviction_candidate, now)
            else:
                tier.policy.resize(key, variant.eviction_candidate)
        self.feed.publish(variant)

    def _replace(self, old: CatalogVariant, new: CatalogVariant) -> None:
        """Remove a variant but keep its copy on disk until the new variant has one."""
        self.catalog.remove(old)
        self._cancel(old)
        if old.memory is not None:
            if new.memory is None:
                self.memory.policy.remove(old.key)
            self.memory.release(old.memory)
            old.memory = None
        if old.disk is not None and new.disk is None:
            self.disk.policy.remove(old.key)
        new.superseded = old.superseded if old.disk is None else old
        old.superseded = None
        if new.disk is not None:
            self.drop_superseded(new)

    def drop_superseded(self, variant: CatalogVariant) -> None:
        """Drop the copy on disk of the variant that this one replaced."""
        older, variant.superseded = variant.superseded, None
        if older is not None:
            assert older.disk is not None
            self.drop_disk_copy(older.key, older.disk)
            older.disk = None

    def _restore_superseded(self, variant: CatalogVariant) -> bool:
        """Put back the variant that this one replaced, as a restart would.

        Returns False if there is none, or if a delete covers it.
        """
        older = variant.superseded
        if older is None or self.tombstones.covers(older.key, older.origin, older.delete_sequence):
            return False
        variant.superseded = None
        self.catalog.remove(variant)
        self._cancel(variant)
        older.inherit_use(variant)
        self.catalog.add(older)
        self.disk.policy.add(older.key, older.eviction_candidate, self.clock())
        self.feed.publish(older)
        return True

    def remove_from_memory(self, variant: CatalogVariant, reason: Miss) -> None:
        """Release a copy in memory that the policy has already removed.

        The variant stays stored on disk, is replaced by the one before it, or is dropped.
        """
        assert variant.memory is not None
        self.memory.release(variant.memory)
        variant.memory = None
        if variant.disk is not None:
            self.feed.publish(variant)
        elif not self._restore_superseded(variant):
            self.drop(variant, reason)

    def drop(self, variant: CatalogVariant, reason: Miss) -> None:
        """Remove a variant from every tier, and note the reason."""
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
        self.copies.pop(key, None)
        self.holds.release(key)
        self.misses.note(key, reason)
        self.feed.publish(variant)

    @staticmethod
    def _cancel(variant: CatalogVariant) -> None:
        if variant.job is not None:
            variant.job.done.cancel()  # a running job notices by itself
            variant.job = None

    def evict_from_memory(self, is_enough: Callable[[], bool], *, unwritten: bool = False) -> None:
        """Evict copies from memory until that is enough or no victim is left.

        Args:
            is_enough: Whether no more has to be evicted.
            unwritten: Evict also values whose write to disk is pending, which are lost, and those
                that waiting requests need.
        """

        def may_evict(key: VariantKey) -> bool:
            variant = self.catalog.get(key)
            assert variant is not None
            assert variant.memory is not None
            if variant.memory.in_use or (key in self.holds and not unwritten):
                return False
            is_last_copy = variant.disk is None and variant.superseded is None
            if is_last_copy and self._has_children(self.disk, key):
                return False
            return variant.job is None or (unwritten and not variant.job.urgent)

        while not is_enough():
            key = self.memory.policy.evict(may_evict)
            if key is None:
                return
            variant = self.catalog.get(key)
            assert variant is not None
            assert variant.memory is not None
            self._count_eviction(Tier.MEMORY, variant)
            variant.note_demoted()
            self.remove_from_memory(variant, Miss.EVICTED)

    def evict_from_disk(self, pages: int) -> bool:
        """Drop copies on disk of so many pages. Return False if there is no victim.

        What waiting requests need is dropped only if there is no other victim.
        """
        freed = 0
        while freed < pages:
            key = self.disk.policy.evict(self._may_leave_disk)
            if key is None and not freed:
                key = self.disk.policy.evict(self._may_be_dropped)
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
        return key not in self.holds and self._may_be_dropped(key)

    def _may_be_dropped(self, key: VariantKey) -> bool:
        variant = self.catalog.get(key)
        assert variant is not None
        assert variant.disk is not None
        if variant.memory is None and self._has_children(self.memory, key):
            return False
        return not variant.disk.in_use

    def needed_on_disk(self, key: VariantKey) -> bool:
        """Return whether a child on disk requires that its parent is on disk too."""
        return self._has_children(self.disk, key)

    @staticmethod
    def _has_children(tier: TierSpace, key: VariantKey) -> bool:
        """Return whether a tier has a child of key, which must not outlive it."""
        return tier.policy.leaves_only and not tier.policy.is_leaf(key)

    def drop_disk_copy(self, key: VariantKey, copy: TierCopy) -> None:
        """Queue a copy on disk, so that its metadata is removed and its pages are freed."""
        self.dropped_copies.append(DroppedCopy(key, copy))
        self._dropped_pages += num_pages(copy.num_bytes)

    def release_dropped_copies(self, count: int) -> bool:
        """Release the first dropped copies, whose metadata is removed.

        Returns whether any pages became free.
        """
        removed = self.dropped_copies[:count]
        del self.dropped_copies[:count]
        self._dropped_pages -= sum([num_pages(dropped.copy.num_bytes) for dropped in removed])
        return sum([self.disk.release(dropped.copy) for dropped in removed]) > 0

    def disk_pages_to_evict(self) -> int:
        """Return the pages to evict from disk now, without those that are being freed."""
        excess = self.disk.excess_pages()
        return max(0, excess - self._dropped_pages) if excess else 0

    def disk_pages_for(self, num_bytes: int) -> int:
        """Return the pages to evict from disk before num_bytes can be allocated."""
        missing = self.disk.missing_pages(num_bytes)
        return max(0, missing - self._dropped_pages) if missing else 0

    def _count_eviction(self, tier: Tier, variant: CatalogVariant) -> None:
        self.counters.evictions[tier] += 1
        self.telemetry.evicted(tier, self.options.policy, variant.info.num_bytes)

    def hold(self, variant: CatalogVariant, hold_s: float) -> None:
        """Keep a stored variant for a waiting request.

        Args:
            variant: The variant.
            hold_s: Time for which no tier evicts it; MAX_HOLD_S at most.
        """
        until_s = self.clock() + min(hold_s, MAX_HOLD_S)
        num_bytes = num_pages(variant.info.num_bytes) * PAGE_BYTES
        self.holds.hold(variant.key, variant.origin.domain, num_bytes, until_s)

    def expire(self) -> None:
        """End expired leases, holds and quarantines."""
        now = self.clock()
        self.holds.expire(now)
        for lease in self.leases.expire(now):
            self.tier(lease.tier).release(lease.copy)
        for until, copy in self.quarantined:
            if until <= now:
                self.memory.release(copy)
        self.quarantined = [item for item in self.quarantined if item[0] > now]

    def find_swappable(self, key: VariantKey, identity: int) -> CatalogVariant | None:
        """Return the variant if its encoding can be swapped: no reader and no pending write."""
        variant = self.catalog.get(key)
        if variant is None or variant.identity != identity or variant.job is not None:
            return None
        copies = [copy for copy in (variant.memory, variant.disk) if copy is not None]
        return None if any(copy.in_use for copy in copies) else variant

    def make_successor(
        self, old: CatalogVariant, info: VariantInfo, parts: tuple[ValuePart, ...]
    ) -> CatalogVariant:
        """Make the same variant in another encoding. The caller installs it."""
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
            tag=old.tag,
            wants_higher_precision=old.wants_higher_precision,
        )
        self.next_identity += 1
        variant.inherit_use(old)
        return variant

    def last_seen_delete(self, as_of: AsOf) -> int:
        """Return the sequence of the last delete that a computation has seen."""
        if as_of.store != self.store_id:
            return 0
        seen = min(as_of.sequence, self.tombstones.last_sequence)
        if as_of.planned_at_ms:
            unix_ms = as_of.planned_at_ms - MAX_CLOCK_SKEW_MS
            # A plan from the future counts as made now.
            at_ms = self.steady.of_unix(as_of.planned_at_ms) - MAX_CLOCK_SKEW_MS
            seen = min(seen, self.tombstones.applied_by(at_ms, unix_ms))
        return seen

    def in_batches(self) -> Iterator[CatalogVariant]:
        """Yield every variant, and take the lock once for each batch.

        A variant that is removed before its batch is left out.
        """
        with self.lock:
            variants = list(self.catalog)
        for start in range(0, len(variants), BATCH_VARIANTS):
            with self.lock:
                batch = [
                    variant
                    for variant in variants[start : start + BATCH_VARIANTS]
                    if self.catalog.contains(variant)
                ]
            yield from batch

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent. For tests, without other callers."""
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
    """Return why a stored variant may not serve, or None if it may."""
    if domain and variant.origin.domain != domain:
        return Miss.OTHER_DOMAIN
    if exact and not variant.info.provenance.exact:
        return Miss.APPROXIMATE
    if exact and not variant.info.precision.lossless:
        return Miss.OTHER_PRECISION
    return None
