"""Writes what was accepted to disk, in the background; what somebody waits for first."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

from ragcache_cachestore.catalog import Holding
from ragcache_cachestore.threads import end
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
            raise Unavailable(
                "cachestore", "the value was dropped, or the store ended, first"
            ) from None


class WriteBehind:
    """Threads that call write for each job, in order, urgent ones first."""

    def __init__(self, write: Callable[[Holding], None], threads: int = THREADS) -> None:
        self._write = write
        self._changed = threading.Condition()
        self._urgent: OrderedDict[Job, None] = OrderedDict()
        self._jobs: OrderedDict[Job, None] = OrderedDict()
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
            (self._urgent if urgent else self._jobs)[job] = None
            self._changed.notify()
        job.done.add_done_callback(lambda _: self._forget(job))
        return job

    def _forget(self, job: Job) -> None:
        """A job is done, or cancelled before its turn."""
        if not job.done.cancelled():
            return
        with self._changed:
            self._urgent.pop(job, None)
            self._jobs.pop(job, None)
            self._changed.notify_all()

    def hurry(self, job: Job) -> None:
        """Somebody waits for a job that was queued without hurry."""
        with self._changed:
            job.urgent = True
            if job in self._jobs:
                del self._jobs[job]
                self._urgent[job] = None

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything queued has been written or refused; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._jobs or self._urgent or self._running), timeout_s
            )

    def close(self, timeout_s: float) -> bool:
        """Stop after the writes at hand; False if they take longer. Who waits for more is told."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            left = [*self._urgent, *self._jobs]
        for job in left:
            job.done.cancel()
        if left:
            log.info("%d values are left unwritten", len(left))
        return end(self._threads, timeout_s)

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
                job, _ = queue.popitem(last=False)
                if job.done.set_running_or_notify_cancel():
                    self._running += 1
                    return job
                self._changed.notify_all()  # cancelled right now
