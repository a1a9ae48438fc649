"""A background task that works on one item after the other, until all of them are done."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

from ragcache_core.errors import NotFound, RagCacheError, Unavailable
from ragcache_retriever.concurrency.background import BackgroundTask

log = logging.getLogger(__name__)

FAILURE_PAUSE_S = 10.0
PAUSE_S = 0.01
"""Time after which an item that vanished meanwhile is looked at again."""


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
