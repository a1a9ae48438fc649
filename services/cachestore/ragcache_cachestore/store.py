"""The store: two tiers of one file each behind one catalog, and what its calls promise each other.

Any number of threads call in. The state (``state``) say what is held and are kept under one lock,
for microseconds; bytes move and disks are waited for outside it (``mover``).

Deletes. A delete is on disk before it shows, and shows at once in whole: from then on the catalog
holds nothing that it covers. What arrives later is measured by the deletes that its computation had
seen (``AsOf``), and records found at a start by those that they were put after.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ragcache_cachestore.background.re_encoder import ReEncodingCandidate
from ragcache_cachestore.background.sweeper import Sweeper
from ragcache_cachestore.background.tier_mover import RETRY_AFTER_S, TierMover
from ragcache_cachestore.background.write_back import WriteJob
from ragcache_cachestore.incoming_put import COMMIT_TIMEOUT_S, IncomingPut
from ragcache_cachestore.state.catalog import CatalogVariant, replaces
from ragcache_cachestore.state.leases import ReadLease
from ragcache_cachestore.state.store_state import StoreState, refusal
from ragcache_cachestore.state.tombstones import AWAY_MS, LIFETIME_MS, Tombstones
from ragcache_cachestore.storage.data_dir import DataDir
from ragcache_cachestore.storage.disk_tier import DiskTier
from ragcache_cachestore.storage.memory_tier import MemoryTier
from ragcache_cachestore.storage.metadata_db import MetadataDb
from ragcache_cachestore.storage.status_page import StatusPage
from ragcache_cachestore.storage.tier_space import TierCopy, TierSpace
from ragcache_cachestore.telemetry.counters import Stats, score_histogram
from ragcache_cachestore.telemetry.exporter import StoreLevels, Telemetry
from ragcache_core.errors import InvalidInput, TooLarge, Unavailable
from ragcache_core.eviction import DEFAULT_POLICY, make_policy
from ragcache_core.eviction.admission import make_admission
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, Precision, Tier, ValuePart, VariantInfo
from ragcache_core.storage.extents import PAGE_BYTES
from ragcache_core.store_api import (
    ID_BYTES,
    Ack,
    AsOf,
    Deletion,
    Event,
    EventKind,
    LookupAnswer,
    LookupKey,
    NewVariant,
    PutCompletion,
    PutOutcome,
    Tombstone,
)
from ragcache_kv.values.outgoing_value import ReadyValue

log = logging.getLogger(__name__)

MAX_VALUE_BYTES = 256 << 20
"""Bound of one value, whatever the tiers hold."""

INCOMING_SHARE = 0.5
"""Share of memory that values on their way in may take, since they cannot be evicted."""

SWEEP_EVERY_S = 0.5
ALIVE_EVERY_S = 10.0
FORGET_EVERY_S = 600.0
FLUSH_TIMEOUT_S = 15.0
SCORES_EVERY_S = 15.0
REREADS_AT_ONCE = 32
SERVED_CAPACITY = 65_536
"""Keys whose served bytes are counted until they are taken."""


class Store:
    """A cache store on a folder. Every method may be called from any thread.

    memory_bytes, disk_bytes: capacities, never exceeded. policy, admission: by name, of
    ``ragcache_core``. leaves_only: a parent outlives its children in a tier (``exact``). clock:
    seconds, never going back. wall_ms: Unix time. free_bytes: room left on the folder's volume.

    memory_tier, disk_tier: where the bytes of leases lie. status_page: what clients that remember where a
    value lies look at before they trust it. telemetry: told of what happens.
    """

    def __init__(
        self,
        folder: Path,
        memory_bytes: int,
        disk_bytes: int,
        *,
        policy: str = DEFAULT_POLICY,
        admission: str = "always",
        leaves_only: bool = False,
        telemetry: Telemetry | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        """Open folder. Raises InvalidInput if it cannot be used."""
        self.telemetry = telemetry or Telemetry()
        self._wall_ms = wall_ms
        self._leaves_only = leaves_only
        self._delete_lock = threading.Lock()
        self._histogram: tuple[float, tuple[int, ...]] = (-math.inf, ())
        with contextlib.ExitStack() as ends:
            data = DataDir(folder)
            ends.callback(data.close)
            self.memory_tier = MemoryTier(memory_bytes)
            ends.callback(self.memory_tier.close)
            self.status_page = StatusPage()
            ends.callback(self.status_page.close)
            self.disk_tier = DiskTier(data.values, disk_bytes, free_bytes)
            ends.callback(self.disk_tier.close)
            self._metadata = MetadataDb(data.records)
            ends.callback(self._metadata.close)
            disk_policy = make_policy(policy, leaves_only=leaves_only)
            self._state = StoreState(
                memory=TierSpace(self.memory_tier.allocator, make_policy(policy, leaves_only=leaves_only)),
                disk=TierSpace(self.disk_tier.allocator, disk_policy),
                admission=make_admission(admission, disk_policy),
                policy_name=policy,
                store_id=self._metadata.store_id,
                clock=clock,
                telemetry=self.telemetry,
            )
            self._sweeper = Sweeper(
                clock,
                [
                    (SWEEP_EVERY_S, self.sweep),
                    (ALIVE_EVERY_S, self._note_alive),
                    (FORGET_EVERY_S, self.forget_tombstones),
                ],
            )
            self._mover = TierMover(
                self._state,
                self.memory_tier,
                self.disk_tier,
                self._metadata,
                leaves_only=leaves_only,
                sweep_soon=self._sweeper.wake,
            )
            ends.callback(self._mover.close)
            self._load()
            self._files = ends.pop_all()
        self._sweeper.start()
        self.telemetry.observe(self._levels)

    def close(self, *, flush: bool = True) -> None:
        """Write what was accepted, unless flush is False, and close. No call may come any more.

        A disk that hangs is not waited for: after FLUSH_TIMEOUT_S what is not written is left, and
        a thread that is stuck keeps the files open until the process ends.
        """
        ended = self._sweeper.close()
        try:
            if flush and not self._mover.writer.flush(FLUSH_TIMEOUT_S):
                log.warning("the disk is slow: not all that was accepted is written")
            ended = self._mover.close() and ended
            if flush and ended:
                self._mover.free_dropped_copies()
                self._metadata.note_alive(self._wall_ms())
        except Unavailable as error:
            log.warning("not all that was dropped could be recorded as such: %s", error)
        if ended:
            self._files.close()

    # What it is

    @property
    def boot(self) -> bytes:
        """Id of this start."""
        return self._state.feed.boot

    @property
    def store_id(self) -> bytes:
        """Id of the data folder."""
        return self._metadata.store_id

    @property
    def max_value_bytes(self) -> int:
        """Bound of one value."""
        return min(MAX_VALUE_BYTES, self.memory_tier.allocator.num_pages * PAGE_BYTES)

    def __len__(self) -> int:
        return len(self._state.catalog)

    # Reading

    def lookup(
        self, wants: Sequence[LookupKey], exact: bool = False, domain: str = ""
    ) -> LookupAnswer:
        """What is held of each want, and the deletes that this answer has seen."""
        with self._state.lock:
            variants = tuple([self._state.lookup(want, exact, domain) for want in wants])
            as_of = AsOf(self.store_id, self._state.tombstones.last_sequence)
            misses = [one.miss for one in variants if one.miss is not None]
            self._state.counters.misses.update(misses)
        for miss in misses:
            self.telemetry.miss(miss)
        return LookupAnswer(variants, as_of)

    def open(
        self, keys: Sequence[VariantKey], exact: bool = False, domain: str = ""
    ) -> list[ReadLease | Miss]:
        """A lease for each value that is held and may serve, to be released; else why not.

        Whoever asked is answered first, and then this is counted (``note_opened``).
        """
        self._mover.idle_window.note_call()
        now = self._state.clock()
        with self._state.lock:
            return [self._open(key, exact, domain, now) for key in keys]

    def note_opened(self, answers: Sequence[ReadLease | Miss]) -> None:
        """Count what ``open`` gave: for the policies, and what is to be moved because of it."""
        now = self._state.clock()
        cold: list[CatalogVariant] = []
        with self._state.lock:
            for one in answers:
                if isinstance(one, Miss):
                    self._state.counters.misses[one] += 1
                elif self._state.catalog.get(one.key) is one.variant:  # not deleted meanwhile
                    self._used(one.variant, one.tier, now)
                    if one.on_disk and self._state.should_promote(one.variant):
                        cold.append(one.variant)
        for variant in cold:
            self._mover.promoter.submit(variant, now=False)
        for one in answers:
            if isinstance(one, Miss):
                self.telemetry.miss(one)

    def release(self, lease_ids: Iterable[int], corrupt: Iterable[int] = ()) -> None:
        """End leases. corrupt: those whose bytes did not match; they are read again first."""
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
        if suspects:  # else whoever released would wait for a disk that it has no use for
            self._mover.try_free_dropped_copies()

    def is_leased(self, lease_id: int) -> bool:
        """Whether a lease has not ended: what was read until now was as it should be."""
        with self._state.lock:
            lease = self._state.leases.get(lease_id)
            return lease is not None and lease.expires_at > self._state.clock()

    def note_reread(self, key: VariantKey, times: int) -> int:
        """A client has read a value from memory again, without asking. Its bytes; 0: not held."""
        now, num_bytes = self._state.clock(), 0
        for start in range(0, times, REREADS_AT_ONCE):
            with self._state.lock:  # again and again, so that nobody waits long
                variant = self._state.catalog.get(key)
                if variant is None:
                    return 0
                num_bytes = variant.info.num_bytes
                for _ in range(min(REREADS_AT_ONCE, times - start)):
                    self._used(variant, Tier.MEMORY, now)
        return num_bytes

    def prefetch(self, keys: Sequence[VariantKey]) -> int:
        """Bring values from disk into memory, in the background; how many that begins for."""
        with self._state.lock:
            found = [self._state.catalog.get(key) for key in dict.fromkeys(keys)]
            cold = [one for one in found if one is not None and one.memory is None]
        return sum([self._mover.promoter.submit(variant, now=True) for variant in cold])

    def pin(self, keys: Sequence[VariantKey], seconds: float) -> int:
        """Keep values from eviction for some time; how many are pinned now."""
        until = self._state.clock() + seconds
        with self._state.lock:
            found = [self._state.catalog.get(key) for key in dict.fromkeys(keys)]
            return sum(
                [
                    self._state.pins.pin(variant.key, variant.info.num_bytes, until)
                    for variant in found
                    if variant is not None
                ]
            )

    def unpin(self, keys: Sequence[VariantKey]) -> int:
        """End pins; how many there were."""
        with self._state.lock:
            return sum([self._state.pins.unpin(key) for key in dict.fromkeys(keys)])

    # Putting

    def begin_put(
        self, new: NewVariant, ack: Ack = Ack.ACCEPTED, timeout_s: float = COMMIT_TIMEOUT_S
    ) -> IncomingPut | PutOutcome:
        """Room for a value that is coming, or why none is needed.

        With Ack.DURABLE, ALREADY_STORED is said when what is held is on disk. Raises TooLarge;
        Unavailable if there is no room now.
        """
        self._mover.idle_window.note_call()
        self._check_size(new.info, ack)
        if new.origin.parent == new.key:
            raise InvalidInput(
                "header.origin.parent", "is the variant itself", "name the one before it, or none"
            )
        with self._state.lock:
            seen = self._state.last_seen_delete(new.as_of)
            if self._state.tombstones.covers(new.key, new.origin, seen):
                return PutOutcome.DELETED
            held = self._state.catalog.get(new.key)
            if held is not None and replaces(new.info, held):
                held = None
            if held is None:
                self._reserve_incoming(new.info.num_bytes)
                self._state.incoming_bytes += new.info.num_bytes
        if held is not None:
            if ack is Ack.DURABLE:
                self._wait_until_written(new.key, timeout_s)
            return PutOutcome.ALREADY_STORED
        try:
            copy = self._mover.allocate_in_memory(new.info.num_bytes)
        except BaseException:
            with self._state.lock:
                self._state.incoming_bytes -= new.info.num_bytes
            raise
        self.memory_tier.grow(copy.extents)
        return IncomingPut(self, new, copy, seen)

    def commit(
        self, incoming: IncomingPut, completion: PutCompletion, ack: Ack, timeout_s: float
    ) -> PutOutcome:
        """See IncomingPut.commit."""
        new = incoming.new
        try:
            incoming.add_checksums_up_to(new.info.num_bytes)
            wrong = incoming.sums.first_mismatch_or_missing(completion.checksums)
        except BaseException:
            self.abort(incoming, 0.0)
            raise
        if wrong is not None:
            self.abort(incoming, 0.0)
            raise InvalidInput(
                f"completion.checksums[{wrong}]",
                "does not match the bytes sent",
                "send the XXH3-64 of the part",
            )
        outcome = self._accept(incoming, completion, ack)
        if ack is Ack.DURABLE and outcome is not PutOutcome.DELETED:
            self._wait_until_written(new.key, timeout_s)
            with self._state.lock:
                seen = incoming.delete_sequence
                if self._state.tombstones.covers(new.key, new.origin, seen):
                    return PutOutcome.DELETED
        return outcome

    def _wait_until_written(self, key: VariantKey, timeout_s: float) -> None:
        """Return when what is held of key is on disk, or nothing is. Raises Unavailable."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._state.lock:
                held = self._state.catalog.get(key)
                job = None if held is None else self._written(held)
            if held is None or job is None:
                return
            try:
                job.wait(max(0.0, deadline - time.monotonic()))
            except Unavailable:
                with self._state.lock:
                    if self._state.catalog.contains(held):
                        raise
                # It was replaced: what did that is to be waited for.

    def abort(self, incoming: IncomingPut, quarantine_s: float) -> None:
        """See IncomingPut.abort."""
        with self._state.lock:
            self._state.incoming_bytes -= incoming.new.info.num_bytes
            if quarantine_s:
                self._state.quarantined.append((self._state.clock() + quarantine_s, incoming.copy))
            else:
                self._state.memory.release(incoming.copy)
            self._state.memory_freed.notify_all()

    # Deleting

    def delete(self, deletion: Deletion) -> int:
        """Remove what a deletion covers, for good when this returns; how many variants went.

        See delete_many.
        """
        return self.delete_many([deletion])

    def delete_many(self, batch: Sequence[Deletion]) -> int:
        """Apply deletions with one wait for the disk; how many variants went.

        One whose id was applied before does nothing, nor does one that was made longer ago than
        deletes live: who has it from another shard would remove what came since. One without an id
        gets one, and one without a time, or of the future, is made now. Raises Unavailable, with
        nothing changed, if the disk refuses.
        """
        now_ms = self._wall_ms()
        dated = [
            one if 0 < one.made_at_ms <= now_ms else replace(one, made_at_ms=now_ms)
            for one in batch
        ]
        young = [one for one in dated if one.made_at_ms > now_ms - LIFETIME_MS]
        if len(young) < len(batch):
            log.warning("ignored %d deletes of more than a day ago", len(batch) - len(young))
        named = {
            one.id: one
            for one in [replace(one, id=one.id or os.urandom(ID_BYTES)) for one in young]
        }
        removed = 0
        with self._delete_lock:
            with self._state.lock:
                new = [one for one in named.values() if one.id not in self._state.tombstones]
                first = self._state.tombstones.last_sequence + 1
            if not new:
                return 0
            tombstones = [Tombstone(sequence, one) for sequence, one in enumerate(new, first)]
            self._metadata.put_tombstones(tombstones)
            for tombstone in tombstones:
                with self._state.lock:
                    self.status_page.count_withdrawal()
                    self._state.tombstones.add(tombstone, now_ms)
                    doomed = self._state.catalog.covered_by(tombstone.deletion)
                    for variant in doomed:
                        self._state.drop(variant, Miss.DELETED)
                    self._state.memory_freed.notify_all()
                removed += len(doomed)
        self.telemetry.deleted(removed)
        self._mover.try_free_dropped_copies()
        return removed

    def tombstones_since(self, since_ms: int) -> list[Deletion]:
        """Deletes applied here since then, as Unix time, in that order.

        Those found at the start count as applied then. Those that are about to be forgotten are
        left out, so that nobody learns of them anew.
        """
        old_ms = self._wall_ms() - LIFETIME_MS
        with self._state.lock:
            told = self._state.tombstones.since(since_ms)
        return [one.deletion for one in told if one.deletion.made_at_ms > old_ms]

    def discard(self, key: VariantKey) -> bool:
        """Drop a variant as eviction does, without a tombstone; whether it was held."""
        with self._state.lock:
            variant = self._state.catalog.get(key)
            if variant is not None:
                self._state.drop(variant, Miss.EVICTED)
        self._mover.try_free_dropped_copies()
        return variant is not None

    # Watching

    def snapshot(self) -> tuple[int, list[Event]]:
        """The sequence of the last event, and a STORED for everything held then."""
        with self._state.lock:
            sequence = self._state.feed.sequence
            held = [(one.key, one.tier, one.info) for one in self._state.catalog]
        boot = self.boot
        return sequence, [
            Event(boot, sequence, EventKind.STORED, key, tier, info) for key, tier, info in held
        ]

    def events_after(self, sequence: int) -> list[Event] | None:
        """Events after sequence, oldest first; None if a snapshot is needed."""
        with self._state.lock:
            return self._state.feed.after(sequence)

    def watch(self, wake: Callable[[], None]) -> None:
        """Call wake at every event from now on; it must return at once."""
        with self._state.lock:
            self._state.feed.watch(wake)

    def unwatch(self, wake: Callable[[], None]) -> None:
        """Undo watch."""
        with self._state.lock:
            self._state.feed.unwatch(wake)

    # Counting

    def note_sent(self, tier: Tier, transport: str, num_bytes: int, seconds: float) -> None:
        """A value went out. seconds: from the call until its last byte was handed over."""
        with self._state.lock:
            self._state.counters.bytes_by_transport[transport] += num_bytes
            self._state.load_models[tier].observe(num_bytes, seconds)
        self.telemetry.hit(tier, transport, num_bytes, seconds)

    def note_timed_out(self, tier: Tier) -> None:
        """A value that was opened is worth nothing: its lease was over before it had been read."""
        with self._state.lock:
            self._state.counters.hits[tier] -= 1
            self._state.counters.misses[Miss.TIMED_OUT] += 1
        self.telemetry.miss(Miss.TIMED_OUT)

    def note_put(
        self, outcome: PutOutcome, ack: Ack, transport: str, num_bytes: int, seconds: float
    ) -> None:
        """A put ended. seconds: from the call until it was acknowledged."""
        with self._state.lock:
            if outcome is PutOutcome.STORED:
                self._state.counters.bytes_by_transport[transport] += num_bytes
        self.telemetry.put(outcome, ack, transport, num_bytes, seconds)

    def stats(self) -> Stats:
        """How it stands, and what happened since the start."""
        histogram = self._scores()
        unwritten = self._mover.writer.backlog
        with self._state.lock:
            by_precision = self._state.catalog.bytes_by_precision
            return Stats(
                variants=len(self._state.catalog),
                disk_bytes=self._state.disk.used_bytes,
                disk_capacity_bytes=self._state.disk.capacity_bytes,
                memory_bytes=self._state.memory.used_bytes,
                memory_capacity_bytes=self._state.memory.capacity_bytes,
                hits=dict(self._state.counters.hits),
                misses_by_reason={f"{miss}": n for miss, n in self._state.counters.misses.items()},
                corrupt=self._state.counters.corrupt,
                puts=self._state.counters.puts,
                evictions=dict(self._state.counters.evictions),
                bytes_by_precision={f"{name}": size for name, size in by_precision.items()},
                bytes_by_transport=dict(self._state.counters.bytes_by_transport),
                leases=len(self._state.leases),
                tombstones=len(self._state.tombstones),
                unwritten=unwritten,
                score_histogram=histogram,
            )

    def _scores(self) -> tuple[int, ...]:
        """The histogram of scores; it takes long, so it may be SCORES_EVERY_S old."""
        now = self._state.clock()
        until, histogram = self._histogram
        if now >= until:
            histogram = score_histogram(
                [one.score for one in self.candidates(now) if one.score > 0]
            )
            self._histogram = now + SCORES_EVERY_S, histogram
        return histogram

    # For who keeps it: precision, placement, replicas

    def candidates(self, now: float) -> Iterator[ReEncodingCandidate]:
        """Everything held and visible, as it is while this is read."""
        with self._state.lock:
            variants = list(self._state.catalog)
        for start in range(0, len(variants), 256):
            with self._state.lock:  # again and again, so that nobody waits long
                held = [
                    one for one in variants[start : start + 256] if self._state.catalog.contains(one)
                ]
            for variant in held:
                yield ReEncodingCandidate(
                    key=variant.key,
                    identity=variant.identity,
                    info=variant.info,
                    shape=variant.shape,
                    parts=variant.parts,
                    value_format=variant.value_format,
                    tier=variant.tier,
                    reads=variant.reads,
                    score=variant.score(now),
                    wants_higher_precision=variant.wants_higher_precision,
                )

    def read(self, key: VariantKey, identity: int) -> bytearray | None:
        """A copy of a value as held; None if that record is gone or corrupt. Counts as no use."""
        with self._state.lock:
            variant = self._state.catalog.get(key)
        if variant is None or variant.identity != identity:
            return None
        return self._mover.read_copy(variant)

    def export(self, key: VariantKey) -> tuple[NewVariant, ReadyValue] | None:
        """A copy of a value and what a put of it needs; None if not held. Counts as no use."""
        with self._state.lock:
            variant = self._state.catalog.get(key)
        value = None if variant is None else self._mover.read_copy(variant)
        if variant is None or value is None:
            return None
        new = NewVariant(
            key=key,
            info=variant.info,
            part_bytes=tuple([part.num_bytes for part in variant.parts]),
            origin=replace(variant.origin, cost_s=0.0),
            shape=variant.shape,
            value_format=variant.value_format,
        )
        checksums = [part.checksum for part in variant.parts]
        return new, ReadyValue(memoryview(value), checksums, variant.origin.cost_s)

    def swap(
        self,
        key: VariantKey,
        identity: int,
        precision: Precision,
        parts: Sequence[ValuePart],
        views: Sequence[memoryview],
    ) -> bool:
        """Hold a value in another encoding, if that record is still held and nobody reads it.

        views: one for each part. False: nothing was changed.
        """
        return self._mover.swap(key, identity, precision, parts, views)

    def want_better(self, key: VariantKey, wanted: bool) -> None:
        """Say in lookups whether a variant deserves better than it is held with."""
        with self._state.lock:
            variant = self._state.catalog.get(key)
            if variant is not None:
                variant.wants_higher_precision = wanted

    def set_replicas(self, key: VariantKey, shards: tuple[str, ...]) -> None:
        """Other shards that hold a variant, for lookups to tell; forgotten when it goes."""
        with self._state.lock:
            if shards and self._state.catalog.get(key) is not None:
                self._state.replicas[key] = shards
            else:
                self._state.replicas.pop(key, None)

    def take_served(self) -> Mapping[VariantKey, int]:
        """Bytes served of each variant since the last call."""
        with self._state.lock:
            served, self._state.served = self._state.served, {}
            return served

    def flush(self) -> None:
        """Return when everything accepted so far that is to be written has been."""
        self._mover.writer.flush()

    def check(self) -> None:
        """Raise AssertionError if the state do not balance. For tests."""
        with self._state.lock:
            self._state.check()

    # Within

    def _load(self) -> None:
        """Take up what the folder holds; nothing if it was away for longer than deletes live."""
        now_ms, now = self._wall_ms(), self._state.clock()
        away_ms = now_ms - self._metadata.last_alive_ms
        if self._metadata.last_alive_ms and away_ms > AWAY_MS:
            log.warning("starting empty: away for %.0f h, deletes may be missed", away_ms / 3.6e6)
            self._metadata.clear()
        with contextlib.suppress(Unavailable):  # a full disk: it may still be read
            self._metadata.note_alive(now_ms)
        self._state.tombstones = Tombstones(
            self._metadata.tombstones(),
            last_sequence=self._metadata.delete_sequence,
            applied_ms=now_ms,
        )
        for key, record in self._metadata.load(self.disk_tier.allocator):
            copy = TierCopy(record.extents, record.info.num_bytes)
            self._state.next_identity = max(self._state.next_identity, record.put_order + 1)
            self._mover.note_recorded(key, copy)
            if self._state.tombstones.covers(key, record.origin, record.delete_sequence):
                self._state.drop_disk_copy(key, copy)
                continue
            variant = CatalogVariant(
                key=key,
                identity=record.put_order,
                info=record.info,
                parts=record.parts,
                origin=record.origin,
                shape=record.shape,
                value_format=record.value_format,
                delete_sequence=record.delete_sequence,
                put_at=now,
                disk=copy,
            )
            self._state.catalog.add(variant)
            self._state.disk.policy.add(key, variant.eviction_candidate, now)
        self._mover.try_free_dropped_copies()

    def _open(self, key: VariantKey, exact: bool, domain: str, now: float) -> ReadLease | Miss:
        variant = self._state.catalog.get(key)
        if variant is None:
            return self._state.miss_reason(key)
        miss = refusal(variant, exact, domain)
        if miss is not None:
            return miss
        tier, copy = self._state.fastest_copy(variant)
        return self._state.leases.grant(variant, tier, copy, now)

    def _used(self, variant: CatalogVariant, tier: Tier, now: float) -> None:
        """A value is read from a tier."""
        key = variant.key
        variant.note_read(now)
        self._state.memory.policy.touch(key, now)
        self._state.disk.policy.touch(key, now)
        self._state.counters.hits[tier] += 1
        if key in self._state.served or len(self._state.served) < SERVED_CAPACITY:
            self._state.served[key] = self._state.served.get(key, 0) + variant.info.num_bytes
        if variant.disk is None and variant.job is None and self._state.should_write(variant, now):
            variant.job = self._mover.writer.submit(variant, urgent=False)

    def _reserve_incoming(self, num_bytes: int) -> None:
        bound = self._state.memory.capacity_bytes * INCOMING_SHARE
        if self._state.incoming_bytes and self._state.incoming_bytes + num_bytes > bound:
            raise Unavailable(
                "cachestore", "too many values are arriving at once", retry_after_s=RETRY_AFTER_S
            )

    def _written(self, variant: CatalogVariant) -> WriteJob | None:
        """The job to wait for until a variant is on disk, which is made urgent; None if it is."""
        if variant.disk is not None:
            return None
        if variant.job is None:
            variant.job = self._mover.writer.submit(variant, urgent=True)
        else:
            self._mover.writer.make_urgent(variant.job)
        return variant.job

    def _accept(self, incoming: IncomingPut, completion: PutCompletion, ack: Ack) -> PutOutcome:
        """Show an incoming, unless a delete or another put was faster."""
        now, new = self._state.clock(), incoming.new
        with self._state.lock:
            self._state.incoming_bytes -= new.info.num_bytes
            held = self._state.catalog.get(new.key)
            deleted = self._state.tombstones.covers(new.key, new.origin, incoming.delete_sequence)
            if deleted or (held is not None and not replaces(new.info, held)):
                self._state.memory.release(incoming.copy)
                self._state.memory_freed.notify_all()
                return PutOutcome.DELETED if deleted else PutOutcome.ALREADY_STORED
            variant = CatalogVariant(
                key=new.key,
                identity=self._state.next_identity,
                info=new.info,
                parts=tuple(map(ValuePart, new.part_bytes, completion.checksums)),
                origin=replace(new.origin, cost_s=completion.cost_s),
                shape=new.shape,
                value_format=new.value_format,
                delete_sequence=self._state.tombstones.last_sequence,
                put_at=now,
                memory=incoming.copy,
            )
            self._state.next_identity += 1
            if held is not None:
                self.status_page.count_withdrawal()
                variant.inherit_use(held)
            self._state.install(variant, held, now)
            self._state.counters.puts += 1
            # What a restart would find of a replaced value is to give way to the new one.
            if ack is Ack.DURABLE or variant.superseded is not None:
                self._written(variant)
            elif self._state.needed_on_disk(new.key) or self._state.should_write(variant, now):
                variant.job = self._mover.writer.submit(variant, urgent=False)
            parent = self._state.catalog.get(new.origin.parent) if new.origin.parent else None
            if self._leaves_only and parent is not None and parent.memory is None:
                self._mover.promoter.submit(parent, now=False)
            if self._state.memory.excess_pages():
                self._sweeper.wake()
        return PutOutcome.STORED

    def _check_size(self, info: VariantInfo, ack: Ack) -> None:
        if info.num_bytes > self.max_value_bytes:
            raise TooLarge(
                "header.info.num_bytes",
                f"is {info.num_bytes}",
                f"send at most {self.max_value_bytes} bytes, or raise RAGCACHE_MEMORY_BYTES",
            )
        if ack is Ack.DURABLE and info.num_bytes > self._state.disk.capacity_bytes:
            raise TooLarge(
                "header.info.num_bytes",
                f"{info.num_bytes} is more than the whole disk tier holds",
                "raise RAGCACHE_DISK_BYTES, or put it without waiting for the disk",
            )

    def sweep(self) -> None:
        """End what is over, and evict down to the low watermarks. Raises Unavailable."""
        self.status_page.beat()
        with self._state.lock:
            self._state.expire()
            if excess := self._state.memory.excess_pages():
                self._state.evict_from_memory(excess)
            self._state.memory_freed.notify_all()
        # First: a disk that refuses this frees nothing, however much is given up.
        self._mover.free_dropped_copies()
        with self._state.lock:
            if excess := self._state.disk_pages_to_evict():
                self._state.evict_from_disk(excess)
        self._mover.free_dropped_copies()

    def _note_alive(self) -> None:
        self.disk_tier.punch_free(self._state.lock)
        self._metadata.note_alive(self._wall_ms())

    def forget_tombstones(self) -> None:
        """Forget deletes that are too old to matter. Raises Unavailable."""
        before_ms = self._wall_ms() - LIFETIME_MS
        with self._delete_lock:
            # What they covered must be gone for good before they are.
            self._mover.free_dropped_copies()
            self._metadata.sync()
            self._metadata.drop_tombstones(before_ms)
            with self._state.lock:
                self._state.tombstones.forget(before_ms)

    def _levels(self) -> StoreLevels:
        stats = self.stats()
        return StoreLevels(
            variants=stats.variants,
            memory_bytes=stats.memory_bytes,
            memory_capacity_bytes=stats.memory_capacity_bytes,
            disk_bytes=stats.disk_bytes,
            disk_capacity_bytes=stats.disk_capacity_bytes,
            leases=stats.leases,
            tombstones=stats.tombstones,
            unwritten=stats.unwritten,
            bytes_by_precision=stats.bytes_by_precision,
            score_histogram=stats.score_histogram,
        )
