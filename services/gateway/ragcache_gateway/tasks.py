"""Tasks that run beside requests until the gateway stops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from ragcache_core.errors import RagCacheError

log = logging.getLogger(__name__)

T = TypeVar("T")


class BackgroundTasks:
    """The tasks of one service, which ``close`` ends. A subclass begins them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """End every task that runs."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Begin a task."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _repeat(
        self, work: Callable[[], Awaitable[object]], every_s: float, problem: str
    ) -> None:
        """Do work periodically, until cancelled. A failure is logged, and the state stays.

        Args:
            every_s: Time between the end of one turn and the next one.
            problem: What the log says of a turn that fails.
        """
        while True:
            try:
                await work()
            except RagCacheError as error:
                log.info("%s error=%s", problem, error)
            except Exception:
                log.exception("%s", problem)
            await asyncio.sleep(every_s)
