"""Writes what was accepted to disk, in the background; what somebody waits for first."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

from ragcache_cachestore.catalog import Holding
from ragcache_core.errors import Unavailable

log = logging.getLogger(__name__)

THREADS = 2
"""Enough to overlap one value's write with another's record."""


@dataclass(slots=True, eq=False)
class Job:
    """A write to come. urgent: somebody waits for it."""

    holding: Holding
    urgent: bool
    done: Future[None] = field(default_factory=Future)

    def wait(self, timeout_s: float) -> None:
        """Until it is written. Raises Unavailable if that fails or takes too long."""
        try:
            self.done.result(timeout_s)
        except TimeoutError:
            raise Unavailable("cachestore", "its disk is slow: the write is not done yet") from None
        except CancelledError:
            raise Unavailable("cachestore", "the value was dropped before it was written") from None


class WriteBehind:
    """Threads that call write for each job, in order, urgent ones first."""

    def __init__(self, write: Callable[[Holding], None], threads: int = THREADS) -> None:
        self._write = write
        self._changed = threading.Condition()
        self._urgent: deque[Job] = deque()
        self._jobs: deque[Job] = deque()
        self._running = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"writer-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, holding: Holding, *, urgent: bool) -> Job:
        """Queue the write of a holding."""
        job = Job(holding, urgent)
        with self._changed:
            (self._urgent if urgent else self._jobs).append(job)
            self._changed.notify()
        return job

    def hurry(self, job: Job) -> None:
        """Somebody waits for a job that was queued without hurry."""
        with self._changed:
            if not job.urgent:
                job.urgent = True
                # It stays in the other queue, too, and is passed over there.
                self._urgent.append(job)
                self._changed.notify()

    def flush(self) -> None:
        """Return when everything queued before has been written or refused."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._jobs or self._urgent or self._running))

    def close(self, *, flush: bool) -> None:
        """Stop; with flush, when everything queued is written."""
        if flush:
            self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._write(job.holding)
            except Unavailable as error:
                job.done.set_exception(error)
            except Exception as error:
                log.exception("a value could not be written")
                job.done.set_exception(Unavailable("cachestore", f"its disk fails: {error}"))
            else:
                job.done.set_result(None)
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _next(self) -> Job | None:
        with self._changed:
            while True:
                if self._closed:
                    return None
                queue = self._urgent or self._jobs
                if not queue:
                    self._changed.wait()
                    continue
                job = queue.popleft()
                # A hurried job is in both queues; a cancelled one needs nothing.
                begun = job.done.running() or job.done.done()
                if not begun and job.done.set_running_or_notify_cancel():
                    self._running += 1
                    return job
                self._changed.notify_all()
