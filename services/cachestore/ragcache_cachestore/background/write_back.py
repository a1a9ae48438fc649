"""Writes what was accepted to disk, in the background; what somebody waits for first.

What nobody waits for is written in the idle_window, unless it has waited for long or has become much.
What somebody waits for goes before it always.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

from ragcache_cachestore.background.idle_window import IdleWindow
from ragcache_cachestore.background.threads import end
from ragcache_cachestore.state.catalog import CatalogVariant
from ragcache_core.errors import Unavailable

log = logging.getLogger(__name__)

THREADS = 2
"""Enough to overlap one value's write with another's record."""


@dataclass(slots=True, eq=False)
class WriteJob:
    """A write to come. urgent: somebody waits for it."""

    variant: CatalogVariant
    urgent: bool
    since: float
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


class WriteBack:
    """Threads that call write for each job, in order, urgent ones first.

    max_waiting_bytes: of values that may wait for a pause together.
    """

    def __init__(
        self,
        write: Callable[[CatalogVariant], None],
        threads: int = THREADS,
        *,
        max_waiting_bytes: float = 0,
        idle_window: IdleWindow | None = None,
    ) -> None:
        self._write = write
        self._max_waiting_bytes = max_waiting_bytes
        self._idle_window = idle_window or IdleWindow()
        self._waiting_bytes = 0
        self._draining = False
        self._watched = False
        self._changed = threading.Condition()
        self._urgent: OrderedDict[WriteJob, None] = OrderedDict()
        self._jobs: OrderedDict[WriteJob, None] = OrderedDict()
        self._running = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"writer-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, variant: CatalogVariant, *, urgent: bool) -> WriteJob:
        """Queue the write of a variant."""
        job = WriteJob(variant, urgent, since=self._idle_window.clock())
        with self._changed:
            if urgent:
                self._urgent[job] = None
            else:
                self._jobs[job] = None
                self._waiting_bytes += variant.info.num_bytes
            # Who watches the clock already need not be woken for one more.
            if urgent or not self._watched or self._waiting_bytes > self._max_waiting_bytes:
                self._changed.notify_all()
        job.done.add_done_callback(lambda _: self._forget(job))
        return job

    def _forget(self, job: WriteJob) -> None:
        """A job is done, or cancelled before its turn."""
        if not job.done.cancelled():
            return
        with self._changed:
            self._urgent.pop(job, None)
            self._unqueue(job)
            self._changed.notify_all()

    def _unqueue(self, job: WriteJob) -> bool:
        """Take a job out of those that wait for a pause; whether it was there."""
        if job not in self._jobs:
            return False
        del self._jobs[job]
        self._waiting_bytes -= job.variant.info.num_bytes
        return True

    @property
    def backlog(self) -> int:
        """Writes that are queued or under way."""
        with self._changed:
            return len(self._urgent) + len(self._jobs) + self._running

    def drain(self) -> None:
        """Somebody waits for room: write without waiting for idle_window until nothing is queued."""
        with self._changed:
            if self._jobs and not self._draining:
                self._draining = True
                self._changed.notify_all()

    def make_urgent(self, job: WriteJob) -> None:
        """Somebody waits for a job that was queued without hurry."""
        with self._changed:
            job.urgent = True
            if self._unqueue(job):
                self._urgent[job] = None
                self._changed.notify_all()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything queued has been written or refused; False if that takes longer."""
        self.drain()
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
                self._write(job.variant)
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

    def _next(self) -> WriteJob | None:
        with self._changed:
            while not self._closed:
                job = self._due()
                if job is None:
                    self._wait()
                    continue
                self._urgent.pop(job, None)
                self._unqueue(job)
                if job.done.set_running_or_notify_cancel():
                    self._running += 1
                    return job
                self._changed.notify_all()  # cancelled right now
            return None

    def _due(self) -> WriteJob | None:
        """The job whose turn it is; None if none is to be written yet."""
        if self._urgent:
            return next(iter(self._urgent))
        if not self._jobs:
            self._draining = False
            return None
        first = next(iter(self._jobs))
        return first if self._wait_s(first) <= 0 else None

    def _wait_s(self, first: WriteJob) -> float:
        if self._draining or self._waiting_bytes > self._max_waiting_bytes:
            return 0.0
        return self._idle_window.wait_s(first.since)

    def _wait(self) -> None:
        """Until something changes or the first job is due; one thread watches the clock for it."""
        if not self._jobs or self._watched:
            self._changed.wait()
            return
        self._watched = True
        self._changed.wait(self._wait_s(next(iter(self._jobs))))
        self._watched = False
        if len(self._jobs) > 1:
            self._changed.notify()
