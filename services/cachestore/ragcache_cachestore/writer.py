"""One thread that writes, and group commit: what waits together is synced together."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ragcache_core.errors import Unavailable

R = TypeVar("R")

log = logging.getLogger(__name__)

GROUP_MAX = 64
"""Most writes of one sync, so that the first of them does not wait for ever longer groups."""

_Job = tuple[Callable[[], Any], "Future[Any]"]


class GroupWriter:
    """Runs writes one after another in the order of submission, then makes them durable.

    sync: makes durable whatever the writes before it wrote. One sync serves all writes that
    queued up during the sync before, so its cost is shared exactly when there is much to write.
    """

    def __init__(self, sync: Callable[[], None]) -> None:
        self._sync = sync
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def submit(self, write: Callable[[], R]) -> Future[R]:
        """Queue a write; the future holds its result once that is durable, or its error."""
        future: Future[R] = Future()
        self._queue.put((write, future))
        return future

    def close(self) -> None:
        """Finish what is queued, then stop. Nothing may be submitted any more."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        open_ = True
        while open_:
            group: list[_Job] = []
            job = self._queue.get()
            while job is not None:
                group.append(job)
                if len(group) == GROUP_MAX or self._queue.empty():
                    break
                job = self._queue.get()
            else:
                open_ = False
            self._commit(group)

    def _commit(self, group: list[_Job]) -> None:
        written: list[tuple[Future[Any], Any]] = []
        for write, future in group:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                written.append((future, write()))
            except Exception as error:  # whatever it is, it belongs to the caller of this write
                future.set_exception(error)
        if not written:
            return
        try:
            self._sync()
        except Exception as error:
            log.exception("sync failed")
            for future, _ in written:
                future.set_exception(Unavailable("cachestore", f"its disk cannot sync: {error}"))
            return
        for future, result in written:
            future.set_result(result)
