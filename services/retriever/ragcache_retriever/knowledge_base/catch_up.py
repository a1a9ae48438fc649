"""Background tasks that follow what happened elsewhere, in an index or in another process.

A write that is committed succeeds, even if an index in another service does not answer. One task
tries again until the index has all rows, and opens indexes that could not be opened. Another one
reloads the collections of a shared store soon after another process has changed them.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from ragcache_retriever.concurrency.background import BackgroundTask, attempted
from ragcache_retriever.concurrency.threads import finish, run
from ragcache_retriever.knowledge_base.collections import CollectionSet
from ragcache_retriever.knowledge_base.remake import Remake

log = logging.getLogger(__name__)

PERIOD_S = 0.5
"""Polling interval of both tasks."""
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
"""Time after a failure. It doubles with each further one."""
REFRESH_PAUSE_S = 2.0
"""Additional time after collections could not be reloaded."""


class ChangeFollower:
    """The tasks of one knowledge base."""

    def __init__(self, collections: CollectionSet, remake: Remake) -> None:
        self._collections = collections
        self._remake = remake
        # A thread of its own, because a service that hangs must not hold the writer or a reader.
        self._thread = ThreadPoolExecutor(1, "catch-up")
        self._completing = BackgroundTask("catch-up", self._complete_indexes)
        self._refreshing = BackgroundTask("refresh", self._refresh_collections)

    def start(self) -> None:
        """Begin."""
        self._completing.start()
        if self._collections.store.database.is_shared:
            self._refreshing.start()

    async def close(self) -> None:
        """End after the step that is running."""
        await self._refreshing.stop()
        await self._completing.stop()
        await finish(self._thread)

    async def _complete_indexes(self) -> None:
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
        collections = self._collections
        results = []
        if collections.is_stale:
            reloading = collections.threads.write(collections.reload)
            results.append(await attempted(log, "index: not open", reloading))
        for generation in collections.indexes.behind():
            catching_up = run(self._thread, collections.indexes.catch_up, generation)
            failure = f"index: still behind generation={generation}"
            results.append(await attempted(log, failure, catching_up))
        return all(results)

    async def _refresh_collections(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            if not await attempted(log, "collections: not refreshed", self._refresh()):
                await asyncio.sleep(REFRESH_PAUSE_S)

    async def _refresh(self) -> None:
        collections = self._collections
        if await collections.threads.read(collections.has_changed):
            await collections.threads.write(collections.reload)
            self._remake.start()
