"""Follows the collections that other processes change in a shared store."""

from __future__ import annotations

import asyncio
import logging

from ragcache_retriever.concurrency.background import BackgroundTask, attempted
from ragcache_retriever.knowledge_base.collections import CollectionSet
from ragcache_retriever.knowledge_base.remake import Remake
from ragcache_retriever.knowledge_base.store_threads import StoreThreads

log = logging.getLogger(__name__)

PERIOD_S = 0.5
FAILURE_PAUSE_S = 2.0


class CollectionRefresh:
    """Reloads the collections soon after another process has changed them."""

    def __init__(self, collections: CollectionSet, threads: StoreThreads, remake: Remake) -> None:
        self._collections = collections
        self._threads = threads
        self._remake = remake
        self._task = BackgroundTask("refresh", self._run)

    def start(self) -> None:
        """Begin."""
        self._task.start()

    async def stop(self) -> None:
        """End."""
        await self._task.stop()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            if not await attempted(log, "collections: not refreshed", self._refresh()):
                await asyncio.sleep(FAILURE_PAUSE_S)

    async def _refresh(self) -> None:
        if await self._threads.read(self._collections.has_changed):
            await self._threads.write(self._collections.reload)
            self._remake.start()
