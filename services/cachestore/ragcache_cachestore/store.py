"""The store: two tiers of one file each behind one catalog, and the promises of its calls.

Any number of threads may call. ``StoreState`` knows what is stored, under one lock that is held for
microseconds. ``TierMover`` moves bytes and waits for the disk outside of that lock.

Deletes. A delete is written to disk before it takes effect, and then takes effect at once: no read
finds a variant that it covers, although these are dropped in batches. A later put is refused if its
computation had not seen the delete (``AsOf``). At start, a variant found on disk is dropped if a
delete came after its put.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from ragcache_cachestore.background.housekeeping import Housekeeping, Sweeper
from ragcache_cachestore.background.tier_mover import TierMover
from ragcache_cachestore.background.variant_access import VariantAccess
from ragcache_cachestore.deletes import Deletes
from ragcache_cachestore.puts import Puts
from ragcache_cachestore.reads import Reads
from ragcache_cachestore.state.catalog import CatalogVariant
from ragcache_cachestore.state.store_feed import is_announced, node_change
from ragcache_cachestore.state.store_state import StoreOptions, StoreState
from ragcache_cachestore.state.store_stats import StatsReader
from ragcache_cachestore.state.tombstones import AWAY_MS, Tombstones
from ragcache_cachestore.storage.data_dir import DataDir, open_metadata
from ragcache_cachestore.storage.disk_cipher import DiskCipher
from ragcache_cachestore.storage.disk_tier import DiskTier
from ragcache_cachestore.storage.disk_variant import DiskVariant
from ragcache_cachestore.storage.memory_tier import MemoryTier
from ragcache_cachestore.storage.metadata_db import MetadataDb
from ragcache_cachestore.storage.status_page import StatusPage
from ragcache_cachestore.storage.tier_space import TierCopy, TierSpace
from ragcache_core.errors import Unavailable
from ragcache_core.eviction import make_policy
from ragcache_core.eviction.admission import make_admission
from ragcache_core.identity.keys import VariantKey
from ragcache_core.knowledge.node_change import NodeChange
from ragcache_wire.feeds.feed_cursor import BATCH_CHANGES
from ragcache_wire.telemetry.catalogue.cachestore import Undecrypted
from ragcache_wire.v1 import cachestore_pb2 as pb

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 15.0

FORGET_INTERVAL_S = 60.0
"""Interval at which the deletes are forgotten whose lifetime is over."""


class Store:
    """A cache store on a data folder. Every method is safe to call from any thread.

    Attributes:
        telemetry: Receives what happens.
        memory_tier: Has the bytes of leases and puts in memory.
        disk_tier: Has the bytes of leases on disk.
        status_page: Tells local clients whether a cached read is valid.
        variants: For the background tasks.
    """

    def __init__(self, folder: Path, options: StoreOptions) -> None:
        """Open the folder, and recover the state from it.

        Raises:
            InvalidInput: The folder cannot be used.
        """
        self.telemetry = options.telemetry
        with contextlib.ExitStack() as resources:
            data = DataDir(folder)
            resources.callback(data.close)
            self.memory_tier = MemoryTier(options.memory_bytes, owns_pages=options.owns_memory)
            resources.callback(self.memory_tier.close)
            self.status_page = StatusPage()
            resources.callback(self.status_page.close)
            # First: a reset removes the values.
            self.metadata = metadata = open_metadata(data, options.wall_ms())
            resources.callback(metadata.close)
            self.disk_tier = DiskTier(data.values, options.disk_bytes, options.free_bytes)
            resources.callback(self.disk_tier.close)
            self.state = state = self._make_state(options)
            cipher = None if options.disk_keys is None else DiskCipher(options.disk_keys)
            self.mover = mover = TierMover(
                state, self.memory_tier, self.disk_tier, metadata, cipher
            )
            resources.callback(mover.close)
            self.reads = Reads(state, mover)
            self.puts = Puts(state, mover, self.memory_tier, self.status_page)
            self.deletes = Deletes(state, mover, metadata, self.status_page)
            self.variants = VariantAccess(state, self.memory_tier, mover)
            self.housekeeping = Housekeeping(
                state, mover, self.disk_tier, metadata, self.status_page
            )
            tasks = [*self.housekeeping.tasks(), (FORGET_INTERVAL_S, self.deletes.forget)]
            self.sweeper = Sweeper(options.clock, tasks, state.sweep_soon)
            self._stats = StatsReader(state, lambda: mover.writer.backlog, metadata.reset)
            recover(state, mover, metadata, self.disk_tier, options.wall_ms())
            self.resources = resources.pop_all()
        self.sweeper.start()
        self.telemetry.observe(self.stats)

    def _make_state(self, options: StoreOptions) -> StoreState:
        memory_policy, disk_policy = (
            make_policy(options.policy, leaves_only=options.leaves_only) for _ in range(2)
        )
        return StoreState(
            options,
            TierSpace(self.memory_tier.allocator, memory_policy),
            TierSpace(self.disk_tier.allocator, disk_policy),
            make_admission(options.admission, disk_policy),
            self.metadata.store_id,
        )

    def close(self, *, flush: bool = True) -> None:
        """Close the store. No call may follow.

        If the disk hangs, values that are not written within FLUSH_TIMEOUT_S are lost. A thread
        that is stuck keeps the files open until the process ends.

        Args:
            flush: Write accepted values first.
        """
        ended = self.sweeper.close()
        try:
            if flush and not self.mover.writer.flush(FLUSH_TIMEOUT_S):
                log.warning("shutdown: the disk is slow, some accepted values are not written")
            ended = self.mover.close() and ended
            if flush and ended:
                self.mover.free_dropped_copies()
                self.metadata.note_alive(self.state.options.wall_ms())
        except Unavailable as error:
            log.warning("shutdown: cannot write the last metadata error=%s", error)
        if ended:
            self.resources.close()

    @property
    def store_id(self) -> bytes:
        """Id of the data folder."""
        return self.metadata.store_id

    def __len__(self) -> int:
        return len(self.state.catalog)

    def stats(self) -> pb.StatsReply:
        """Return the sizes now, and the counts since the start."""
        return self._stats.read()

    def note_connections(self, count: int, *, evicted: bool = False, refused: bool = False) -> None:
        """Count the connections of the data transports.

        Args:
            count: Open ones now.
            evicted: One was ended to have room for another.
            refused: One was refused, because all others are in use.
        """
        with self.state.lock:
            counters = self.state.counters
            counters.connections = count
            counters.connections_evicted += evicted
            counters.connections_refused += refused

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent. For tests."""
        with self.state.lock:
            self.state.check()

    # The feed (FeedSource)

    @property
    def boot(self) -> bytes:
        """Id of this start."""
        return self.state.feed.log.boot

    @property
    def sequence(self) -> int:
        """Number of the last change in the feed."""
        with self.state.lock:
            return self.state.feed.log.sequence

    def changes_after(self, sequence: int, limit: int) -> list[NodeChange] | None:
        """Return the first changes after a sequence number; None: a snapshot is needed."""
        with self.state.lock:
            return self.state.feed.log.after(sequence, limit)

    def node_batches(self) -> Iterator[list[NodeChange]]:
        """Yield all variants in batches, each as it is when the iterator reaches it."""
        variants = filter(is_announced, self.state.in_batches())
        while batch := list(islice(variants, BATCH_CHANGES)):
            yield [node_change(variant) for variant in batch]

    def watch(self, wake: Callable[[], None]) -> None:
        """Call wake at every change from now on. It must not block."""
        with self.state.lock:
            self.state.feed.watch(wake)

    def unwatch(self, wake: Callable[[], None]) -> None:
        """Stop calling wake."""
        with self.state.lock:
            self.state.feed.unwatch(wake)


def recover(
    state: StoreState, mover: TierMover, metadata: MetadataDb, disk_tier: DiskTier, now_ms: int
) -> None:
    """Load a data folder.

    A folder that was away for longer than deletes live is emptied first, because it may have
    missed some.

    Args:
        now_ms: Unix time in milliseconds.
    """
    away_ms = now_ms - metadata.last_alive_ms
    if metadata.last_alive_ms and away_ms > AWAY_MS:
        log.warning(
            "recovery: dropped all values, because deletes may be missed away_h=%.0f",
            away_ms / 3.6e6,
        )
        metadata.clear_variants()
    with contextlib.suppress(Unavailable):  # a full disk can still be read
        metadata.note_alive(now_ms)
    state.tombstones = Tombstones.recovered(
        metadata.tombstones(), metadata.delete_sequence, metadata.forgotten, state.steady
    )
    now = state.clock()
    unreadable: Counter[Undecrypted] = Counter()
    for key, found in metadata.load(disk_tier.allocator):
        copy = TierCopy(found.extents, found.info.num_bytes, encryption=found.encryption)
        mover.note_recorded(key, copy)
        reason = mover.unreadable(copy)
        if reason is None:
            _recover_variant(state, key, found, copy, now)
        else:
            unreadable[reason] += 1
            state.drop_disk_copy(key, copy)
        state.next_identity = max(state.next_identity, found.put_order + 1)
    for reason, count in unreadable.items():
        state.telemetry.undecrypted(reason, count)
        log.warning(
            "recovery: dropped values that the keys of the disk do not decrypt count=%d reason=%s",
            count,
            reason.value,
        )
    mover.try_free_dropped_copies()
    if mover.decrypts:
        mover.erase_free()


def _recover_variant(
    state: StoreState, key: VariantKey, found: DiskVariant, copy: TierCopy, now: float
) -> None:
    # Before a delete is forgotten, what it covers is removed from disk.
    seen = max(found.delete_sequence, state.tombstones.forgotten_sequence)
    if state.tombstones.covers(key, found.origin, seen):
        state.drop_disk_copy(key, copy)
        return
    variant = CatalogVariant(
        key=key,
        identity=found.put_order,
        info=found.info,
        parts=found.parts,
        origin=found.origin,
        shape=found.shape,
        value_format=found.value_format,
        delete_sequence=found.delete_sequence,
        put_at=now,
        tag=found.tag,
        disk=copy,
    )
    state.catalog.add(variant)
    state.disk.policy.add(key, variant.eviction_candidate, now)
