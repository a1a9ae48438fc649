"""The delete path: write tombstones, drop what they cover, report them to other shards."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from ragcache_cachestore.background.tier_mover import TierMover
from ragcache_cachestore.state.store_state import StoreState
from ragcache_cachestore.state.tombstones import LIFETIME_MS
from ragcache_cachestore.storage.metadata_db import MetadataDb
from ragcache_cachestore.storage.status_page import StatusPage
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss
from ragcache_core.store_api import ID_BYTES, Deletion, Tombstone

log = logging.getLogger(__name__)


class Deletes:
    """The delete path of one store.

    Args:
        wall_ms: Returns the Unix time in milliseconds.
    """

    def __init__(
        self,
        state: StoreState,
        mover: TierMover,
        metadata: MetadataDb,
        status_page: StatusPage,
        wall_ms: Callable[[], int],
    ) -> None:
        self._state = state
        self._mover = mover
        self._metadata = metadata
        self._status_page = status_page
        self._wall_ms = wall_ms

    def apply(self, deletions: Sequence[Deletion]) -> int:
        """Apply deletions with one sync of the disk. Return how many variants were removed.

        A deletion whose id was applied before is ignored. So is one that is older than deletes
        live, because it would remove what was put since. The store adds a missing id or time.

        Raises:
            Unavailable: The disk refuses. Nothing has changed.
        """
        now_ms = self._wall_ms()
        by_id = {one.id: one for one in self._complete(deletions, now_ms)}
        num_removed = 0
        with self._state.delete_lock:
            with self._state.lock:
                new = [one for one in by_id.values() if one.id not in self._state.tombstones]
                first = self._state.tombstones.last_sequence + 1
            if not new:
                return 0
            tombstones = [Tombstone(sequence, one) for sequence, one in enumerate(new, first)]
            self._metadata.put_tombstones(tombstones)
            for tombstone in tombstones:
                num_removed += self._apply_one(tombstone, now_ms)
        self._state.telemetry.deleted(num_removed)
        self._mover.try_free_dropped_copies()
        return num_removed

    @staticmethod
    def _complete(deletions: Sequence[Deletion], now_ms: int) -> list[Deletion]:
        """Add missing ids and times, and leave out the deletes older than their lifetime."""
        dated = [
            one if 0 < one.made_at_ms <= now_ms else replace(one, made_at_ms=now_ms)
            for one in deletions
        ]
        recent = [one for one in dated if one.made_at_ms > now_ms - LIFETIME_MS]
        if len(recent) < len(deletions):
            log.warning(
                "deletes: ignored deletes older than their lifetime count=%d",
                len(deletions) - len(recent),
            )
        return [replace(one, id=one.id or os.urandom(ID_BYTES)) for one in recent]

    def _apply_one(self, tombstone: Tombstone, now_ms: int) -> int:
        with self._state.lock:
            self._status_page.count_withdrawal()
            self._state.tombstones.add(tombstone, now_ms)
            covered = self._state.catalog.covered_by(tombstone.deletion)
            for variant in covered:
                self._state.drop(variant, Miss.DELETED)
            self._state.memory_freed.notify_all()
        return len(covered)

    def since(self, since_ms: int) -> list[Deletion]:
        """Return the deletes applied here since a Unix time, in that order.

        The deletes found at start count as applied at the start. Deletes that are about to be
        forgotten are left out, so that no shard remembers them again.
        """
        oldest_ms = self._wall_ms() - LIFETIME_MS
        with self._state.lock:
            tombstones = self._state.tombstones.since(since_ms)
        return [one.deletion for one in tombstones if one.deletion.made_at_ms > oldest_ms]

    def discard(self, key: VariantKey) -> bool:
        """Drop a variant without a tombstone. Return whether it was stored."""
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
