"""The housekeeping thread of a store, which runs each task at its own interval."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from ragcache_cachestore.background.threads import JOIN_TIMEOUT_S, join_all
from ragcache_core.errors import Unavailable

log = logging.getLogger(__name__)


class Sweeper:
    """Runs tasks, each given as (interval in seconds, function).

    ``wake`` runs the first task soon.
    """

    def __init__(
        self, clock: Callable[[], float], tasks: Sequence[tuple[float, Callable[[], None]]]
    ) -> None:
        self._clock = clock
        self._tasks = tasks
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sweeper", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Run the first task soon."""
        self._wake.set()

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
