"""The threads that call the document store: one that writes, and a few that read."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from ragcache_retriever.concurrency.threads import finish, run

P = ParamSpec("P")
T = TypeVar("T")

NUM_READERS = 4


class StoreThreads:
    """Threads of one document store.

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
