"""The delete path: write tombstones, drop what they cover, report them to other shards.

A delete takes effect as a whole, when its tombstone is added. Reads find no variant that it covers
from then on (``StoreState.find``). The variants themselves are dropped in batches, and a kill in
between loses nothing: the next start drops the rest.

A delete must not be forgotten in a way that serves again what it removed. Before a delete is
forgotten, what it covers is removed from disk. Afterwards the store refuses every put that had not
seen it (``Tombstones.covers``), and tells a shard that pulls later that it has missed deletes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

from ragcache_cachestore.background.tier_mover import TierMover
from ragcache_cachestore.state.store_state import StoreState
from ragcache_cachestore.state.tombstones import LIFETIME_MS
from ragcache_cachestore.storage.metadata_db import MetadataDb
from ragcache_cachestore.storage.status_page import StatusPage
from ragcache_core.errors import Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss
from ragcache_core.store_api import (
    ID_BYTES,
    Deletion,
    DeletionBatch,
    ForgottenDeletes,
    Remains,
    Tombstone,
)

log = logging.getLogger(__name__)

KEPT_SHARE = 0.875
"""Share of the bound of tombstones that is kept when it is exceeded.

Otherwise every delete would forget another one.
"""

DROP_BATCH = 32
"""Variants that are dropped while the store's lock is held once, in about half a millisecond."""

DROP_PAUSE_S = 1e-4
"""Pause between two batches, in which waiting lookups get the lock."""

FORGET_BATCH = 256
"""Deletes that are forgotten while the store's lock is held once."""

PULL_BATCH = 256
PULL_BATCH_NAMES = 1024
"""A message to another shard ends with the delete that reaches one of these bounds."""


class Deletes:
    """The delete path of one store."""

    def __init__(
        self,
        state: StoreState,
        mover: TierMover,
        metadata: MetadataDb,
        status_page: StatusPage,
    ) -> None:
        self._state = state
        self._mover = mover
        self._metadata = metadata
        self._status_page = status_page
        self._wall_ms = state.options.wall_ms
        self._max_tombstone_bytes = state.options.max_tombstone_bytes

    def apply(self, deletions: Sequence[Deletion]) -> int:
        """Apply deletions with one sync of the disk. Return how many variants were removed.

        A deletion whose id was applied before is ignored. The store adds a missing id or time.

        Raises:
            Unavailable: The disk refuses. Nothing has changed.
        """
        now_ms = self._wall_ms()
        by_id = {one.id: one for one in self._complete(deletions, now_ms)}
        num_removed = 0
        with self._state.delete_lock:
            with self._state.lock:
                new = [one for one in by_id.values() if one.id not in self._state.tombstones]
            if not new:
                return 0
            for tombstone in self._put_tombstones(new):
                num_removed += self._apply_one(tombstone, Miss.DELETED)
        self._state.telemetry.deleted(num_removed)
        self._mover.try_free_dropped_copies()
        self._forget_excess()
        return num_removed

    @staticmethod
    def _complete(deletions: Sequence[Deletion], now_ms: int) -> list[Deletion]:
        """Add missing ids and times."""
        dated = [
            one if 0 < one.made_at_ms <= now_ms else replace(one, made_at_ms=now_ms)
            for one in deletions
        ]
        return [replace(one, id=one.id or os.urandom(ID_BYTES)) for one in dated]

    def _put_tombstones(self, new: Sequence[Deletion]) -> list[Tombstone]:
        """Write tombstones durably. The caller has the delete lock. Raises Unavailable."""
        first = self._state.tombstones.last_sequence + 1
        tombstones = [Tombstone(sequence, one) for sequence, one in enumerate(new, first)]
        self._metadata.put_tombstones(tombstones)
        return tombstones

    def _apply_one(self, tombstone: Tombstone, reason: Miss) -> int:
        """Apply a delete that is on disk. Return how many variants it has removed.

        It takes effect at once. The variants are dropped in batches, so that a delete of a whole
        domain does not delay lookups. The caller has the delete lock.
        """
        with self._state.lock:
            self._status_page.count_withdrawal()
            keys = iter(self._state.begin_delete(tombstone))
        num_removed = 0
        while batch := list(islice(keys, DROP_BATCH)):
            with self._state.lock:
                num_removed += self._state.drop_deleted(batch, reason)
            if len(batch) == DROP_BATCH:
                # A lock is not fair: without a pause this thread would take it again at once.
                time.sleep(DROP_PAUSE_S)
        with self._state.lock:
            self._state.end_delete()
        return num_removed

    def drop_all(self) -> int:
        """Drop every variant, and refuse the puts that are planned before now. Return their number.

        Another shard has forgotten deletes that this store has never seen. They may cover any
        variant that it has. Other shards do not learn of this.

        Raises:
            Unavailable: The disk refuses. Nothing has changed.
        """
        everything = Deletion(os.urandom(ID_BYTES), made_at_ms=self._wall_ms())
        with self._state.delete_lock:
            (tombstone,) = self._put_tombstones([everything])
            num_removed = self._apply_one(tombstone, Miss.EVICTED)
        self._mover.try_free_dropped_copies()
        return num_removed

    def remains(self, deletion: Deletion) -> Remains:
        """Return what is held of what a deletion names. It need not have been applied."""
        self._mover.try_free_dropped_copies()
        # A delete that is being applied is counted as a whole.
        with self._state.delete_lock, self._state.lock:
            found = [
                self._state.catalog.get(key) for key in self._state.catalog.covered_by(deletion)
            ]
            return Remains(
                in_memory=sum(one is not None and one.memory is not None for one in found),
                on_disk=sum(one is not None and one.disk is not None for one in found),
                unfreed=len(self._state.dropped_copies),
            )

    def after(self, sequence: int) -> DeletionBatch:
        """Return the next deletes after a sequence. The last batch is the one without progress."""
        # No delete is forgotten between the two reads.
        with self._state.delete_lock:
            tombstones = self._state.tombstones
            last, forgotten = tombstones.last_sequence, tombstones.forgotten_sequence
            incomplete = sequence < forgotten
            if sequence > last:  # the volume was restored from an older copy
                incomplete, sequence = True, 0
            found, reached = self._read_batch(sequence)
        deletions = [one for one in found if not one.names_nothing]
        return DeletionBatch(self._state.store_id, reached or last, incomplete, tuple(deletions))

    def _read_batch(self, sequence: int) -> tuple[list[Deletion], int]:
        """Read deletes after a sequence. Also return the last one's, or 0 if there are no more."""
        found: list[Deletion] = []
        num_names = 0
        for tombstone in self._metadata.tombstones(sequence):
            found.append(tombstone.deletion)
            num_names += tombstone.deletion.num_names
            if len(found) == PULL_BATCH or num_names >= PULL_BATCH_NAMES:
                return found, tombstone.sequence
        return found, 0

    def pull_positions(self) -> Mapping[bytes, int]:
        """Return up to which sequence the deletes of other stores are applied here."""
        return self._metadata.pull_positions

    def note_pulled(self, store: bytes, sequence: int) -> None:
        """Note that the deletes of another store are applied here up to a sequence.

        Raises:
            Unavailable: The disk refuses. Nothing has changed.
        """
        if self._metadata.pull_positions.get(store) != sequence:
            self._metadata.put_pull_position(store, sequence, self._wall_ms())

    def forget(self) -> None:
        """Forget the deletes whose lifetime is over, and the oldest above the bound of memory.

        Raises:
            Unavailable: The disk refuses.
        """
        with self._state.lock:
            excess = self._state.tombstones.num_bytes > self._max_tombstone_bytes
        max_bytes = int(self._max_tombstone_bytes * (KEPT_SHARE if excess else 1))
        before_ms = self._state.steady.now_ms() - LIFETIME_MS
        while self._forget_batch(before_ms, max_bytes):
            pass

    def _forget_excess(self) -> None:
        with self._state.lock:
            excess = self._state.tombstones.num_bytes > self._max_tombstone_bytes
        if not excess:
            return
        try:
            self.forget()
        except Unavailable as error:  # the delete is applied; housekeeping tries again
            log.warning("deletes: cannot forget old deletes error=%s", error)

    def _forget_batch(self, before_ms: int, max_bytes: int) -> int:
        """Forget up to FORGET_BATCH of the oldest deletes. Return how many."""
        with self._state.delete_lock:
            with self._state.lock:
                count = self._state.tombstones.num_due(before_ms, max_bytes, FORGET_BATCH)
            if not count:
                return 0
            # What they cover must be removed from disk before they are forgotten.
            self._mover.free_dropped_copies()
            self._metadata.sync()
            oldest = list(islice(self._metadata.tombstones(), count))
            applied_ms = self._state.tombstones.applied_unix_ms(count, self._state.steady)
            sequences = [one.sequence for one in oldest]
            self._metadata.drop_tombstones(sequences, ForgottenDeletes(sequences[-1], applied_ms))
            with self._state.lock:
                self._state.tombstones.forget(oldest)
        return count

    def discard(self, key: VariantKey) -> bool:
        """Drop a variant as eviction does, without a tombstone. Return whether it was stored."""
        return self._discard([key]) > 0

    def discard_orphans(self, keys: Sequence[VariantKey]) -> int:
        """Drop variants that no prompt can reach. Return how many were stored."""
        num_dropped = self._discard(keys)
        self._state.telemetry.orphans_dropped(num_dropped)
        return num_dropped

    def _discard(self, keys: Sequence[VariantKey]) -> int:
        num_dropped = 0
        for key in keys:
            with self._state.lock:
                variant = self._state.catalog.get(key)
                if variant is not None:
                    self._state.drop(variant, Miss.EVICTED)
                    num_dropped += 1
        self._mover.try_free_dropped_copies()
        return num_dropped
