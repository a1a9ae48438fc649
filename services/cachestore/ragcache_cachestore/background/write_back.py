"""Writes values from memory to disk in the background.

An urgent job has a caller that waits for it, and runs first. Other jobs wait for an idle window,
unless they have waited too long or their values add up to too many bytes.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable

from ragcache_cachestore.background.threads import IdleWindow, join_all
from ragcache_cachestore.state.catalog import CatalogVariant, WriteJob
from ragcache_core.errors import Unavailable

log = logging.getLogger(__name__)

THREADS = 2
"""Enough to overlap the write of one value with the metadata of another."""


class WriteBack:
    """Threads that call write for each job, in order, urgent ones first.

    Args:
        max_waiting_bytes: Bound of the values that wait for an idle window together.
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
        self._timed = False  # a thread waits for the time at which the first job is due
        self._changed = threading.Condition()
        self._urgent: OrderedDict[WriteJob, None] = OrderedDict()
        self._waiting: OrderedDict[WriteJob, None] = OrderedDict()
        self._num_running = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"writer-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, variant: CatalogVariant, *, urgent: bool) -> WriteJob:
        """Queue the write of a variant."""
        job = WriteJob(variant, urgent, queued_at=self._idle_window.clock())
        with self._changed:
            if urgent:
                self._urgent[job] = None
            else:
                self._waiting[job] = None
                self._waiting_bytes += variant.info.num_bytes
            # The thread that already waits for the first job need not wake for this one.
            if urgent or not self._timed or self._waiting_bytes > self._max_waiting_bytes:
                self._changed.notify_all()
        job.done.add_done_callback(lambda _: self._remove_cancelled(job))
        return job

    def _remove_cancelled(self, job: WriteJob) -> None:
        if not job.done.cancelled():
            return
        with self._changed:
            self._urgent.pop(job, None)
            self._remove_waiting(job)
            self._changed.notify_all()

    def _remove_waiting(self, job: WriteJob) -> bool:
        """Remove a job that waits for an idle window. Return whether there was one."""
        if job not in self._waiting:
            return False
        del self._waiting[job]
        self._waiting_bytes -= job.variant.info.num_bytes
        return True

    @property
    def backlog(self) -> int:
        """Number of writes that are queued or running."""
        with self._changed:
            return len(self._urgent) + len(self._waiting) + self._num_running

    def start_drain(self) -> None:
        """Write without waiting for idle windows until the queue is empty."""
        with self._changed:
            if self._waiting and not self._draining:
                self._draining = True
                self._changed.notify_all()

    def make_urgent(self, job: WriteJob) -> None:
        """Move a queued job to the urgent ones, because a caller now waits for it."""
        with self._changed:
            job.urgent = True
            if self._remove_waiting(job):
                self._urgent[job] = None
                self._changed.notify_all()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every queued job has ended. Return False if that takes longer."""
        self.start_drain()
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._waiting or self._urgent or self._num_running), timeout_s
            )

    def close(self, timeout_s: float) -> bool:
        """Stop after the current writes, and cancel the queued ones.

        Returns False if the current writes take longer than timeout_s.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            unwritten = [*self._urgent, *self._waiting]
        for job in unwritten:
            job.done.cancel()
        if unwritten:
            log.info("write-back: closed with unwritten values count=%d", len(unwritten))
        return join_all(self._threads, timeout_s)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._write(job.variant)
            except Unavailable as error:
                job.done.set_exception(error)
            except Exception as error:
                log.exception("write-back: write failed")
                job.done.set_exception(Unavailable("cachestore", f"its disk fails: {error}"))
            else:
                job.done.set_result(None)
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    def _next(self) -> WriteJob | None:
        with self._changed:
            while not self._closed:
                job = self._due_job()
                if job is None:
                    self._wait()
                    continue
                self._urgent.pop(job, None)
                self._remove_waiting(job)
                if job.done.set_running_or_notify_cancel():
                    self._num_running += 1
                    return job
                self._changed.notify_all()  # the job was cancelled just now
            return None

    def _due_job(self) -> WriteJob | None:
        """Return the job to write now, if there is one."""
        if self._urgent:
            return next(iter(self._urgent))
        if not self._waiting:
            self._draining = False
            return None
        first = next(iter(self._waiting))
        return first if self._wait_s(first) <= 0 else None

    def _wait_s(self, first: WriteJob) -> float:
        if self._draining or self._waiting_bytes > self._max_waiting_bytes:
            return 0.0
        return self._idle_window.wait_s(first.queued_at)

    def _wait(self) -> None:
        """Wait for a change. One thread also waits for the time at which the first job is due."""
        if not self._waiting or self._timed:
            self._changed.wait()
            return
        self._timed = True
        self._changed.wait(self._wait_s(next(iter(self._waiting))))
        self._timed = False
        if len(self._waiting) > 1:
            self._changed.notify()
