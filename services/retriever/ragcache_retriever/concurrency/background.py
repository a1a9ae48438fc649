"""Work in the background and at once: tasks that errors do not end, and calls for many items."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from ragcache_core.errors import NotFound, RagCacheError, Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")
FAILURE_PAUSE_S = 10.0
PAUSE_S = 0.01
"""Time after which an item that vanished meanwhile is looked at again."""


class BackgroundTask:
    """Runs from ``start`` until ``stop``. One event loop uses it.

    Args:
        name: Of the asyncio task.
        run: What runs. It does not end by itself.
    """

    def __init__(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._name = name
        self._run = run
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, unless it runs."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=self._name)

    async def stop(self) -> None:
        """Cancel it and wait for its end."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def attempted(log: logging.Logger, failure: str, step: Awaitable[object]) -> bool:
    """Await one step of a background task, and log its error.

    The task pauses and tries again. An unexpected error is a defect, so its traceback is logged.

    Args:
        failure: What has failed, for the log.

    Returns:
        Whether the step succeeded.
    """
    try:
        await step
    except RagCacheError as error:
        log.warning("%s error=%s", failure, error)
        return False
    except Exception:
        log.exception("%s", failure)
        return False
    return True


async def for_each(
    items: Iterable[T], function: Callable[[T], Awaitable[object]], *, at_once: int
) -> None:
    """Call a function with each item and wait for all calls.

    The first error cancels the other calls and is raised. A caller that is cancelled meanwhile gets
    CancelledError, also if a call fails at the same time. A ``TaskGroup`` would raise the error
    alone, and a task in the background would try again instead of ending.
    """
    waiting = iter(items)

    async def work() -> None:
        # All workers share one iterator, so that no list of tasks grows with the items.
        for item in waiting:
            await function(item)

    workers = [asyncio.create_task(work()) for _ in range(at_once)]
    try:
        await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    failed = [one for one in workers if not one.cancelled() and one.exception() is not None]
    for worker in failed or workers:
        worker.result()


class ItemTask:
    """Calls a function for each item after each ``start``. One event loop uses it.

    An item that fails is tried again after a time of its own. It delays no other one.

    Args:
        name: Of the task, for logs.
        items: Returns the names of all items.
        work_on: Does all that there is to do for an item. It gets its name.
    """

    def __init__(
        self,
        name: str,
        items: Callable[[], Sequence[str]],
        work_on: Callable[[str], Awaitable[None]],
    ) -> None:
        self._name = name
        self._items = items
        self._work_on = work_on
        self._has_work = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._retry_at_s: dict[str, float] = {}
        """Time of the event loop's clock, by item."""
        self._task = BackgroundTask(name, self._run)

    def start(self) -> None:
        """Begin, or look for work again."""
        self._is_idle.clear()
        self._has_work.set()
        self._task.start()

    async def stop(self) -> None:
        """End after the transaction that is running."""
        await self._task.stop()

    @property
    def is_idle(self) -> bool:
        """Whether there is no work, and no item has to be tried again."""
        return self._is_idle.is_set()

    async def wait_until_idle(self) -> None:
        """Wait until there is no work, and no item has to be tried again."""
        await self._is_idle.wait()

    async def _run(self) -> None:
        while True:
            self._has_work.clear()
            try:
                items = self._items()
            except Exception:
                # A defect must not end the task for the life of the process.
                log.exception("%s: items not listed", self._name)
                await asyncio.sleep(FAILURE_PAUSE_S)
                continue
            for item in items:
                await self._try(item)
            for item in self._retry_at_s.keys() - items:
                del self._retry_at_s[item]
            if not self._has_work.is_set():
                await self._wait()

    async def _try(self, item: str) -> None:
        """Work on an item, unless it has failed lately."""
        now_s = asyncio.get_running_loop().time
        if now_s() < self._retry_at_s.get(item, 0.0):
            return
        try:
            await self._work_on(item)
        except NotFound:  # it was deleted meanwhile
            pause_s = PAUSE_S
        except RagCacheError as error:
            pause_s = error.retry_after_s if isinstance(error, Unavailable) else FAILURE_PAUSE_S
            log.warning("%s: interrupted item=%s error=%s", self._name, item, error)
        except Exception:
            # A defect must not end the task for the life of the process.
            log.exception("%s: failed item=%s", self._name, item)
            pause_s = FAILURE_PAUSE_S
        else:
            self._retry_at_s.pop(item, None)
            return
        self._retry_at_s[item] = now_s() + pause_s

    async def _wait(self) -> None:
        """Wait for work, or until an item is to be tried again."""
        if not self._retry_at_s:
            self._is_idle.set()
            await self._has_work.wait()
            return
        retry_at_s = min(self._retry_at_s.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(retry_at_s):
                await self._has_work.wait()
