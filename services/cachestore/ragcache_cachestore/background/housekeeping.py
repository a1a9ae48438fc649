"""The housekeeping of a store: its tasks, and the thread that runs each at its own interval."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from ragcache_cachestore.background.threads import JOIN_TIMEOUT_S, join_all
from ragcache_cachestore.background.tier_mover import TierMover
from ragcache_cachestore.state.store_state import StoreState
from ragcache_cachestore.storage.disk_tier import DiskTier
from ragcache_cachestore.storage.metadata_db import MetadataDb
from ragcache_cachestore.storage.status_page import StatusPage
from ragcache_core.errors import Unavailable

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 0.5
ALIVE_INTERVAL_S = 10.0


class Housekeeping:
    """Evicts down to the watermarks, and writes heartbeats."""

    def __init__(
        self,
        state: StoreState,
        mover: TierMover,
        disk_tier: DiskTier,
        metadata: MetadataDb,
        status_page: StatusPage,
    ) -> None:
        self._state = state
        self._mover = mover
        self._disk_tier = disk_tier
        self._metadata = metadata
        self._status_page = status_page

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
            memory = self._state.memory
            if excess := memory.excess_pages():
                end = memory.allocator.used_pages - excess
                self._state.evict_from_memory(lambda: memory.allocator.used_pages <= end)
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
        self._metadata.note_alive(self._state.options.wall_ms())


class Sweeper:
    """Runs tasks, each given as (interval in seconds, function).

    Args:
        wake: Runs the first task soon when it is set.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        tasks: Sequence[tuple[float, Callable[[], None]]],
        wake: threading.Event,
    ) -> None:
        self._clock = clock
        self._tasks = tasks
        self._wake = wake
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sweeper", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, timeout_s: float = JOIN_TIMEOUT_S) -> bool:
        """Stop after the current task. Return False if it takes longer than timeout_s."""
        self._closing.set()
        self._wake.set()
        return join_all([self._thread], timeout_s)

    def _run(self) -> None:
        ran_at = [self._clock()] * len(self._tasks)
        while True:
            self._wake.wait(self._tasks[0][0])
            self._wake.clear()
            if self._closing.is_set():
                return
            ran_at[0] = float("-inf")
            for index, (interval_s, task) in enumerate(self._tasks):
                if self._clock() - ran_at[index] >= interval_s:
                    ran_at[index] = self._clock()
                    self._run_task(task)

    @staticmethod
    def _run_task(task: Callable[[], None]) -> None:
        try:
            task()
        except Unavailable as error:
            log.warning("sweeper: task postponed error=%s", error)
        except Exception:
            log.exception("sweeper: task failed")
