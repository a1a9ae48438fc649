"""Brings indexes up to date in the background after they have refused a change.

A write that is committed succeeds, even if an index in another service does not answer. This task
tries again until the index has all rows, and opens indexes that could not be opened.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from ragcache_retriever.concurrency.background import BackgroundTask, attempted
from ragcache_retriever.concurrency.threads import finish, run
from ragcache_retriever.knowledge_base.collections import CollectionSet
from ragcache_retriever.knowledge_base.indexes import GenerationIndexes
from ragcache_retriever.knowledge_base.store_threads import StoreThreads

log = logging.getLogger(__name__)

PERIOD_S = 0.5
"""Time between two looks for an index that is behind."""
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
"""Time after a failure. It doubles with each further one."""


class IndexCatchUp:
    """The background task of one knowledge base. It tries again until the indexes are complete."""

    def __init__(
        self, collections: CollectionSet, indexes: GenerationIndexes, threads: StoreThreads
    ) -> None:
        self._collections = collections
        self._indexes = indexes
        self._threads = threads
        # A thread of its own, because a service that hangs must not hold the writer or a reader.
        self._thread = ThreadPoolExecutor(1, "catch-up")
        self._task = BackgroundTask("catch-up", self._run)

    def start(self) -> None:
        """Begin."""
        self._task.start()

    async def close(self) -> None:
        """End after the step that is running."""
        await self._task.stop()
        await finish(self._thread)

    async def _run(self) -> None:
        pause_s = MIN_PAUSE_S
        while True:
            if await self._step():
                pause_s = MIN_PAUSE_S
                await asyncio.sleep(PERIOD_S)
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(MAX_PAUSE_S, 2 * pause_s)

    async def _step(self) -> bool:
        """Try each index, so that one that fails delays no other. Return whether all succeeded."""
        results = []
        if self._collections.is_stale:
            reloading = self._threads.write(self._collections.reload)
            results.append(await attempted(log, "index: not open", reloading))
        for generation in self._indexes.behind():
            catching_up = run(self._thread, self._indexes.catch_up, generation)
            failure = f"index: still behind generation={generation}"
            results.append(await attempted(log, failure, catching_up))
        return all(results)
