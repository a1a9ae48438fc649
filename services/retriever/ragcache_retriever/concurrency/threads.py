"""Runs blocking functions in thread pools, such as those that call the document store."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

NUM_READERS = 4


async def run(
    threads: ThreadPoolExecutor, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run a blocking function in a pool and return its result.

    Cancelling the caller drops a function that has not begun. A running one ends without effect on
    the caller. The function has the caller's context variables.
    """
    context = contextvars.copy_context()
    call = functools.partial(context.run, function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(threads, call)


async def finish(threads: ThreadPoolExecutor) -> None:
    """Wait for the functions that run, and drop those that have not begun."""
    await asyncio.to_thread(threads.shutdown, cancel_futures=True)


class StoreThreads:
    """The threads that call one document store: one that writes, and a few that read.

    Args:
        clock: Unix time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._writer = ThreadPoolExecutor(1, "writer")
        self.readers = ThreadPoolExecutor(NUM_READERS, "reader")

    async def write(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in the writer's thread. It alone changes documents and indexes."""
        return await run(self._writer, function, *args, **kwargs)

    async def read(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in a thread that reads."""
        return await run(self.readers, function, *args, **kwargs)

    def now_ms(self) -> int:
        """Return the Unix time in milliseconds."""
        return int(self._clock() * 1000)

    async def close(self) -> None:
        """Wait for the functions that run, and drop those that have not begun."""
        await finish(self.readers)
        await finish(self._writer)
