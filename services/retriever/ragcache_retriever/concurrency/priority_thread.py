"""One thread that runs urgent jobs first."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_STOP_PRIORITY = 2


class PriorityThread:
    """Runs jobs one at a time: urgent jobs first, and otherwise in the order of their calls.

    An urgent job waits for at most the job that is running.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.PriorityQueue[tuple[int, int, _ThreadJob | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def call(self, function: Callable[[], T], *, urgent: bool) -> T:
        """Run a function in the thread. Cancelling the call removes a job that still waits."""
        job = _ThreadJob(function)
        self._jobs.put((0 if urgent else 1, next(self._order), job))
        result: T = await asyncio.wrap_future(job.future)
        return result

    def stop(self) -> None:
        """End the thread after all jobs in its queue."""
        self._jobs.put((_STOP_PRIORITY, next(self._order), None))
        self._thread.join()

    def _run(self) -> None:
        while True:
            _, _, job = self._jobs.get()
            if job is None:
                return
            job.run()


class _ThreadJob:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self._function = function

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._function()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)
