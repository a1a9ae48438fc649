"""The read path: lookups, leases, and the counts that follow from reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ragcache_cachestore.background.tier_mover import TierMover
from ragcache_cachestore.state.catalog import CatalogVariant
from ragcache_cachestore.state.leases import ReadLease
from ragcache_cachestore.state.store_state import StoreState, refusal
from ragcache_cachestore.storage.tier_space import TierCopy
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, Tier
from ragcache_core.store_api import (
    REUSE,
    AsOf,
    ChunkVariants,
    LookupAnswer,
    LookupKey,
    ReportedUses,
    VariantUse,
)

REREADS_PER_LOCK = 32
"""Number of repeated reads that are counted while the lock is held, so that no call waits long."""

LOOKUPS_PER_LOCK = 8
"""Number of lookup keys that are answered while the lock is held. One with many variants takes
some hundred microseconds."""

KEYS_PER_LOCK = 256
"""Number of keys that ``find_misses`` checks while the lock is held."""

MAX_REPORTED_TIMES = REREADS_PER_LOCK
"""Bound of the uses of one variant that one report may count. Engines report once a second."""

SERVED_CAPACITY = 65_536
"""Bound of the keys whose served bytes are counted until the replicator takes them."""


class Reads:
    """The read path of one store."""

    def __init__(self, state: StoreState, mover: TierMover) -> None:
        self._state = state
        self._mover = mover

    def lookup(
        self, wanted: Sequence[LookupKey], exact: bool = False, domain: str = ""
    ) -> LookupAnswer:
        """Return the stored variants of each key, and the deletes that the answer has seen."""
        variants: list[ChunkVariants] = []
        misses: list[Miss] = []
        with self._state.lock:
            # Before the first variant is read: a delete that comes after this is not seen by all.
            as_of = AsOf(self._state.store_id, self._state.tombstones.last_sequence)
        for start in range(0, len(wanted), LOOKUPS_PER_LOCK):
            batch = wanted[start : start + LOOKUPS_PER_LOCK]
            with self._state.lock:
                found = [self._state.lookup(one, exact, domain) for one in batch]
                missed = [one.miss for one in found if one.miss is not None]
                self._state.counters.misses.update(missed)
            variants += found
            misses += missed
        for miss in misses:
            self._state.telemetry.miss(miss)
        return LookupAnswer(tuple(variants), as_of)

    def note_lossy_reader(self) -> None:
        """Note that a client may use lossy values, so that the re-encoder makes them."""
        self._state.lossy_lookup_at = self._state.clock()

    def open(
        self, keys: Sequence[VariantKey], exact: bool = False, domain: str = ""
    ) -> list[ReadLease | Miss]:
        """Grant a lease for each value that is stored and may serve.

        The caller answers its client first, and then calls ``note_opened`` to count the reads. With
        encryption the call reads values that are on disk alone, so it may take their time.
        """
        self._mover.idle_window.note_call()
        if not self._mover.decrypts:
            now = self._state.clock()
            with self._state.lock:
                return [self._open(key, exact, domain, now) for key in keys]
        on_disk, held = self._hold(keys, exact, domain)
        decrypted: dict[CatalogVariant, TierCopy] = {}
        try:
            for variant in on_disk:
                if (copy := self._mover.decrypt(variant)) is not None:
                    decrypted[variant] = copy
            now = self._state.clock()
            with self._state.lock:
                return [self._open(key, exact, domain, now, decrypted) for key in keys]
        finally:
            with self._state.lock:
                for copy in (*held, *decrypted.values()):
                    self._state.memory.release(copy)
                self._state.memory_freed.notify_all()

    def _hold(
        self, keys: Sequence[VariantKey], exact: bool, domain: str
    ) -> tuple[list[CatalogVariant], list[TierCopy]]:
        """Keep the values of keys that are in memory.

        Returns:
            The variants that are on disk alone, and the copies of the others, each with a reference
            of the caller. So no value of the request is evicted for another one.
        """
        held, on_disk = [], []
        with self._state.lock:
            for key in dict.fromkeys(keys):
                variant = self._state.find(key)
                if variant is None or refusal(variant, exact, domain) is not None:
                    continue
                if variant.memory is None:
                    on_disk.append(variant)
                else:
                    variant.memory.ref_count += 1
                    held.append(variant.memory)
        return on_disk, held

    def _open(
        self,
        key: VariantKey,
        exact: bool,
        domain: str,
        now: float,
        decrypted: Mapping[CatalogVariant, TierCopy] | None = None,
    ) -> ReadLease | Miss:
        variant = self._state.find(key)
        if variant is None:
            return self._state.miss_reason(key)
        miss = refusal(variant, exact, domain)
        if miss is not None:
            return miss
        source, copy = self._state.fastest_copy(variant)
        if source is Tier.MEMORY or decrypted is None:
            return self._state.leases.grant(variant, source, copy, now)
        if variant not in decrypted:
            return Miss.TIMED_OUT  # memory had no room for it, or it came after the keys were read
        return self._state.leases.grant(variant, Tier.MEMORY, decrypted[variant], now, source)

    def note_opened(
        self, answers: Sequence[ReadLease | Miss], uses: Sequence[VariantUse] = ()
    ) -> None:
        """Count what ``open`` returned, and queue the promotions that follow from it.

        Args:
            uses: How the caller uses each value. Empty: each is REUSE.
        """
        now = self._state.clock()
        to_promote: list[CatalogVariant] = []
        with self._state.lock:
            for one, use in zip(answers, uses or [REUSE] * len(answers), strict=True):
                if isinstance(one, Miss):
                    self._state.counters.misses[one] += 1
                elif self._state.catalog.contains(one.variant):  # not deleted meanwhile
                    self._note_read(one.variant, one.source, now, use)
                    if one.source is Tier.DISK and self._state.should_promote(one.variant):
                        to_promote.append(one.variant)
        for variant in to_promote:
            self._mover.promoter.submit(variant, now=False)
        for one in answers:
            if isinstance(one, Miss):
                self._state.telemetry.miss(one)

    def _note_read(self, variant: CatalogVariant, tier: Tier, now: float, use: VariantUse) -> None:
        key = variant.key
        variant.note_read(now)
        self._state.counters.hits[tier] += 1
        served = self._state.served
        if key in served or len(served) < SERVED_CAPACITY:
            served[key] = served.get(key, 0) + variant.info.num_bytes
        self._note_use(variant, now, use)

    def _note_use(self, variant: CatalogVariant, now: float, use: VariantUse) -> None:
        self._state.memory.policy.touch(variant.key, now, use)
        self._state.disk.policy.touch(variant.key, now, use)
        if variant.disk is None and variant.job is None and self._state.admit_to_disk(variant, now):
            variant.job = self._mover.writer.submit(variant, urgent=False)

    def release(self, lease_ids: Iterable[int], corrupt: Iterable[int] = ()) -> None:
        """End leases.

        Args:
            corrupt: Leases whose bytes did not match. The store verifies these copies first.
        """
        ids, suspects = list(lease_ids), list(corrupt)
        for lease_id in suspects:
            with self._state.lock:
                lease = self._state.leases.get(lease_id)
            if lease is not None and not self._mover.verify(lease.variant, lease.tier, lease.copy):
                self._mover.drop_corrupt(lease.variant, lease.copy)
        with self._state.lock:
            for lease_id in {*ids, *suspects}:
                ended = self._state.leases.end(lease_id)
                if ended is not None:
                    self._state.tier(ended.tier).release(ended.copy)
            self._state.memory_freed.notify_all()
        if suspects:  # otherwise the caller would wait for the disk without need
            self._mover.try_free_dropped_copies()

    def is_leased(self, lease_id: int) -> bool:
        """Return whether a lease has not ended, so that what was read until now is valid."""
        with self._state.lock:
            lease = self._state.leases.get(lease_id)
            return lease is not None and lease.expires_at > self._state.clock()

    def note_reread(self, key: VariantKey, times: int, use: VariantUse = REUSE) -> int:
        """Count reads that a client made from memory without asking.

        Returns the bytes of the value, or 0 if it is not stored any more.
        """
        now, num_bytes = self._state.clock(), 0
        for start in range(0, times, REREADS_PER_LOCK):
            with self._state.lock:
                variant = self._state.find(key)
                if variant is None:
                    return 0
                num_bytes = variant.info.num_bytes
                for _ in range(min(REREADS_PER_LOCK, times - start)):
                    self._note_read(variant, Tier.MEMORY, now, use)
        return num_bytes

    def find_misses(self, keys: Sequence[VariantKey]) -> list[Miss | None]:
        """Return why each variant is not stored; None if it is, or is being put.

        This counts no misses.
        """
        misses: list[Miss | None] = []
        for start in range(0, len(keys), KEYS_PER_LOCK):
            with self._state.lock:
                misses += [
                    None
                    if self._state.find(key) or key in self._state.incoming
                    else self._state.miss_reason(key)
                    for key in keys[start : start + KEYS_PER_LOCK]
                ]
        return misses

    def note_uses(self, reports: Sequence[ReportedUses]) -> int:
        """Count uses that needed no read. They count neither as hits nor for promotion.

        Returns how many uses of stored variants there were, MAX_REPORTED_TIMES of each at most.
        """
        now, counted, unknown = self._state.clock(), 0, 0
        for one in reports:
            times = min(one.times, MAX_REPORTED_TIMES)
            with self._state.lock:
                variant = self._state.find(one.key)
                if variant is None:
                    unknown += times
                    continue
                self._state.counters.reported_uses += times
                for _ in range(times):
                    variant.note_use(now)
                    self._note_use(variant, now, one.use)
            counted += times
        self._state.telemetry.reported_uses(counted, unknown)
        return counted

    def note_sent(self, tier: Tier, transport: str, num_bytes: int, seconds: float) -> None:
        """Count a value that was sent.

        Args:
            seconds: From the call until the last byte was handed over.
        """
        with self._state.lock:
            self._state.counters.bytes_by_transport[transport] += num_bytes
            self._state.load_models[tier].observe(num_bytes, seconds)
        self._state.telemetry.hit(tier, transport, num_bytes, seconds)

    def note_timed_out(self, tier: Tier) -> None:
        """Count an opened value as a miss, because its lease expired while it was read."""
        with self._state.lock:
            self._state.counters.hits[tier] -= 1
            self._state.counters.misses[Miss.TIMED_OUT] += 1
        self._state.telemetry.miss(Miss.TIMED_OUT)

    def take_served(self) -> Mapping[VariantKey, int]:
        """Return the bytes served of each variant since the last call."""
        with self._state.lock:
            served, self._state.served = self._state.served, {}
            return served
