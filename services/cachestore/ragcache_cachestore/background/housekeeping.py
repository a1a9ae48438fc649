"""The housekeeping of a store: eviction down to the watermarks, and heartbeats."""

from __future__ import annotations

from collections.abc import Callable

from ragcache_cachestore.background.tier_mover import TierMover
from ragcache_cachestore.state.store_state import StoreState
from ragcache_cachestore.storage.disk_tier import DiskTier
from ragcache_cachestore.storage.metadata_db import MetadataDb
from ragcache_cachestore.storage.status_page import StatusPage

SWEEP_INTERVAL_S = 0.5
ALIVE_INTERVAL_S = 10.0


class Housekeeping:
    """The tasks of a store's sweeper.

    Args:
        wall_ms: Returns the Unix time in milliseconds.
    """

    def __init__(
        self,
        state: StoreState,
        mover: TierMover,
        disk_tier: DiskTier,
        metadata: MetadataDb,
        status_page: StatusPage,
        wall_ms: Callable[[], int],
    ) -> None:
        self._state = state
        self._mover = mover
        self._disk_tier = disk_tier
        self._metadata = metadata
        self._status_page = status_page
        self._wall_ms = wall_ms

    def tasks(self) -> list[tuple[float, Callable[[], None]]]:
        """Return each task with its interval in seconds."""
        return [
            (SWEEP_INTERVAL_S, self.sweep),
            (ALIVE_INTERVAL_S, self.note_alive),
        ]

    def sweep(self) -> None:
        """End expired leases, and evict down to the low watermarks.

        Raises:
            Unavailable: The disk refuses.
        """
        self._status_page.beat()
        with self._state.lock:
            self._state.expire()
            if excess := self._state.memory.excess_pages():
                self._state.evict_from_memory(excess)
            self._state.memory_freed.notify_all()
        # First, because a disk that refuses this frees no pages, however many are evicted.
        self._mover.free_dropped_copies()
        with self._state.lock:
            if excess := self._state.disk_pages_to_evict():
                self._state.evict_from_disk(excess)
        self._mover.free_dropped_copies()

    def note_alive(self) -> None:
        """Return free pages to a full volume, and write the time to the data folder.

        Raises:
            Unavailable: The disk refuses.
        """
        self._disk_tier.punch_free(self._state.lock)
        self._metadata.note_alive(self._wall_ms())
