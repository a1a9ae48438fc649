"""The store: two tiers of one file each behind one catalog, and the promises of its calls.

Any number of threads may call. ``StoreState`` knows what is stored, under one lock that is held for
microseconds. ``TierMover`` moves bytes and waits for the disk outside of that lock.

Deletes. A delete is written to disk before it takes effect, and then takes effect at once: no read
finds a variant that it covers, although these are dropped in batches. A later put is refused if its
computation had not seen the delete (``AsOf``). At start, a variant found on disk is dropped if a
delete came after its put.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from ragcache_cachestore.background.re_encoder import ReEncodingCandidate
from ragcache_cachestore.components import StoreOptions, open_components
from ragcache_cachestore.incoming_put import COMMIT_TIMEOUT_S, IncomingPut
from ragcache_cachestore.state.leases import ReadLease
from ragcache_cachestore.state.store_feed import is_announced, node_change
from ragcache_cachestore.telemetry.counters import Stats
from ragcache_core.errors import Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, Precision, Tier, ValuePart
from ragcache_core.knowledge.node_change import NodeChange
from ragcache_core.store_api import (
    REUSE,
    Ack,
    Deletion,
    DeletionBatch,
    LookupAnswer,
    LookupKey,
    NewVariant,
    PutOutcome,
    ReportedUses,
    VariantUse,
)
from ragcache_kv.values.outgoing_value import ReadyValue
from ragcache_wire.feeds.feed_cursor import BATCH_CHANGES

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 15.0


class Store:
    """A cache store on a data folder. Every method is safe to call from any thread.

    Attributes:
        telemetry: Receives what happens.
        memory_tier: Has the bytes of leases and puts in memory.
        disk_tier: Has the bytes of leases on disk.
        status_page: Tells local clients whether a cached read is valid.
    """

    def __init__(self, folder: Path, options: StoreOptions) -> None:
        """Open the folder.

        Raises:
            InvalidInput: The folder cannot be used.
        """
        parts = open_components(folder, options)
        self.telemetry = options.telemetry
        self.memory_tier = parts.memory_tier
        self.disk_tier = parts.disk_tier
        self.status_page = parts.status_page
        self._wall_ms = options.wall_ms
        self._metadata = parts.metadata
        self._state = parts.state
        self._mover = parts.mover
        self._sweeper = parts.sweeper
        self._housekeeping = parts.housekeeping
        self._reads = parts.reads
        self._puts = parts.puts
        self._deletes = parts.deletes
        self._variants = parts.variants
        self._swapper = parts.swapper
        self._stats = parts.stats
        self._resources = parts.resources
        self._sweeper.start()
        self.telemetry.observe(self._stats.levels)

    def close(self, *, flush: bool = True) -> None:
        """Close the store. No call may follow.

        If the disk hangs, values that are not written within FLUSH_TIMEOUT_S are lost. A thread
        that is stuck keeps the files open until the process ends.

        Args:
            flush: Write accepted values first.
        """
        ended = self._sweeper.close()
        try:
            if flush and not self._mover.writer.flush(FLUSH_TIMEOUT_S):
                log.warning("shutdown: the disk is slow, some accepted values are not written")
            ended = self._mover.close() and ended
            if flush and ended:
                self._mover.free_dropped_copies()
                self._metadata.note_alive(self._wall_ms())
        except Unavailable as error:
            log.warning("shutdown: cannot write the last metadata error=%s", error)
        if ended:
            self._resources.close()

    @property
    def boot(self) -> bytes:
        """Id of this start."""
        return self._state.feed.log.boot

    @property
    def sequence(self) -> int:
        """Number of the last change in the feed."""
        with self._state.lock:
            return self._state.feed.log.sequence

    @property
    def store_id(self) -> bytes:
        """Id of the data folder."""
        return self._metadata.store_id

    @property
    def max_value_bytes(self) -> int:
        """Bound of one value."""
        return self._puts.max_value_bytes

    def __len__(self) -> int:
        return len(self._state.catalog)

    # Reads (reads.py)

    def lookup(
        self, wanted: Sequence[LookupKey], exact: bool = False, domain: str = ""
    ) -> LookupAnswer:
        """Return the stored variants of each key, and the deletes that the answer has seen."""
        return self._reads.lookup(wanted, exact, domain)

    def open(
        self, keys: Sequence[VariantKey], exact: bool = False, domain: str = ""
    ) -> list[ReadLease | Miss]:
        """Grant a lease for each value that is stored and may serve. The caller releases it."""
        return self._reads.open(keys, exact, domain)

    def note_opened(
        self, answers: Sequence[ReadLease | Miss], uses: Sequence[VariantUse] = ()
    ) -> None:
        """Count what ``open`` returned, and queue the promotions that follow from it."""
        self._reads.note_opened(answers, uses)

    def release(self, lease_ids: Iterable[int], corrupt: Iterable[int] = ()) -> None:
        """End leases."""
        self._reads.release(lease_ids, corrupt)

    def is_leased(self, lease_id: int) -> bool:
        """Return whether a lease has not ended, so that what was read until now is valid."""
        return self._reads.is_leased(lease_id)

    def note_reread(self, key: VariantKey, times: int, use: VariantUse = REUSE) -> int:
        """Count reads that a client made from memory without asking."""
        return self._reads.note_reread(key, times, use)

    def find_misses(self, keys: Sequence[VariantKey]) -> list[Miss | None]:
        """Return why each variant is not stored; None if it is, or is being put."""
        return self._reads.find_misses(keys)

    def note_uses(self, reports: Sequence[ReportedUses]) -> int:
        """Count uses that needed no read. Return how many were of stored variants."""
        return self._reads.note_uses(reports)

    def prefetch(self, keys: Sequence[VariantKey]) -> int:
        """Queue promotions of values on disk. Return how many were queued."""
        return self._reads.prefetch(keys)

    def note_sent(self, tier: Tier, transport: str, num_bytes: int, seconds: float) -> None:
        """Count a value that was sent."""
        self._reads.note_sent(tier, transport, num_bytes, seconds)

    def note_timed_out(self, tier: Tier) -> None:
        """Count an opened value as a miss, because its lease expired while it was read."""
        self._reads.note_timed_out(tier)

    def take_served(self) -> Mapping[VariantKey, int]:
        """Return the bytes served of each variant since the last call."""
        return self._reads.take_served()

    # Puts (puts.py)

    def begin_put(
        self, new: NewVariant, ack: Ack = Ack.ACCEPTED, timeout_s: float = COMMIT_TIMEOUT_S
    ) -> IncomingPut | PutOutcome:
        """Allocate memory for a value, or return why the client need not send it."""
        return self._puts.begin(new, ack, timeout_s)

    def note_put(
        self, outcome: PutOutcome, ack: Ack, transport: str, num_bytes: int, seconds: float
    ) -> None:
        """Count a put that has ended."""
        self._puts.note_put(outcome, ack, transport, num_bytes, seconds)

    # Deletes (deletes.py)

    def delete(self, deletion: Deletion) -> int:
        """Apply one deletion."""
        return self._deletes.apply([deletion])

    def delete_many(self, deletions: Sequence[Deletion]) -> int:
        """Apply deletions with one sync of the disk. Return how many variants were removed."""
        return self._deletes.apply(deletions)

    def drop_all(self) -> int:
        """Drop every variant, because deletes were missed."""
        return self._deletes.drop_all()

    def deletes_after(self, sequence: int) -> DeletionBatch:
        """Return the next deletes after a sequence."""
        return self._deletes.after(sequence)

    def pull_positions(self) -> Mapping[bytes, int]:
        """Return up to which sequence the deletes of other stores are applied here."""
        return self._deletes.pull_positions()

    def note_pulled(self, store: bytes, sequence: int) -> None:
        """Note that the deletes of another store are applied here up to a sequence."""
        self._deletes.note_pulled(store, sequence)

    def discard(self, key: VariantKey) -> bool:
        """Drop a variant as eviction does, without a tombstone. Return whether it was stored."""
        return self._deletes.discard(key)

    def discard_orphans(self, keys: Sequence[VariantKey]) -> int:
        """Drop variants that no prompt can reach. Return how many were stored."""
        return self._deletes.discard_orphans(keys)

    # The feed (FeedSource)

    def changes_after(self, sequence: int, limit: int) -> list[NodeChange] | None:
        """Return the first changes after a sequence number; None: a snapshot is needed."""
        with self._state.lock:
            return self._state.feed.log.after(sequence, limit)

    def node_batches(self) -> Iterator[list[NodeChange]]:
        """Yield all variants in batches, each as it is when the iterator reaches it."""
        variants = filter(is_announced, self._state.in_batches())
        while batch := list(islice(variants, BATCH_CHANGES)):
            yield [node_change(variant) for variant in batch]

    def watch(self, wake: Callable[[], None]) -> None:
        """Call wake at every change from now on. It must not block."""
        with self._state.lock:
            self._state.feed.watch(wake)

    def unwatch(self, wake: Callable[[], None]) -> None:
        """Stop calling wake."""
        with self._state.lock:
            self._state.feed.unwatch(wake)

    # Background tasks (variants.py, background/)

    def candidates(self, now: float) -> Iterator[ReEncodingCandidate]:
        """Yield every stored variant, as it is when the iterator reaches it."""
        return self._variants.candidates(now)

    def children(self, min_age_s: float) -> Iterator[tuple[VariantKey, VariantKey]]:
        """Yield each variant of this age that has a parent, with the parent."""
        return self._variants.children(min_age_s)

    def read(self, key: VariantKey, identity: int) -> bytearray | None:
        """Return a copy of a value, or None if the variant was replaced or is corrupt."""
        return self._variants.read(key, identity)

    def export(self, key: VariantKey) -> tuple[NewVariant, ReadyValue] | None:
        """Return a copy of a value and what a put of it needs, or None if it is not stored."""
        return self._variants.export(key)

    def swap(
        self,
        key: VariantKey,
        identity: int,
        precision: Precision,
        parts: Sequence[ValuePart],
        views: Sequence[memoryview],
    ) -> bool:
        """Store a value in another encoding."""
        return self._swapper.swap(key, identity, precision, parts, views)

    def set_wants_higher_precision(self, key: VariantKey, wanted: bool) -> None:
        """Set whether lookups report that a variant wants a higher precision."""
        self._variants.set_wants_higher_precision(key, wanted)

    def set_copies(self, key: VariantKey, shards: tuple[str, ...]) -> None:
        """Set the other shards that lookups report, until the variant is dropped."""
        self._variants.set_copies(key, shards)

    def sweep(self) -> None:
        """End expired leases, and evict down to the low watermarks."""
        self._housekeeping.sweep()

    def forget_tombstones(self) -> None:
        """Forget deletes that are too old to matter, or too many."""
        self._deletes.forget()

    def stats(self) -> Stats:
        """Return the sizes now, and the counts since the start."""
        return self._stats.stats()

    def note_connections(self, count: int, *, evicted: bool = False, refused: bool = False) -> None:
        """Count the connections of the data transports.

        Args:
            count: Open ones now.
            evicted: One was ended to have room for another.
            refused: One was refused, because all others are in use.
        """
        with self._state.lock:
            counters = self._state.counters
            counters.connections = count
            counters.connections_evicted += evicted
            counters.connections_refused += refused

    def flush(self) -> None:
        """Wait until every queued write has ended."""
        self._mover.writer.flush()

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent. For tests."""
        with self._state.lock:
            self._state.check()
