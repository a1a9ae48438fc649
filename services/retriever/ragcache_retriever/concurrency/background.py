"""Background tasks: their start and end, and what keeps errors from ending them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from ragcache_core.errors import RagCacheError


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
