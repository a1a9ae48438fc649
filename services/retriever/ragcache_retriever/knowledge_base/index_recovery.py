"""Completes indexes and the list of collections in the background, after an error or damage."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from ragcache_retriever.concurrency.background import attempted
from ragcache_retriever.knowledge_base.collections import CollectionSet
from ragcache_retriever.knowledge_base.indexes import GenerationIndexes
from ragcache_retriever.knowledge_base.store_threads import StoreThreads

log = logging.getLogger(__name__)

PERIOD_S = 1.0
FAILURE_PAUSE_S = 30.0
"""An attempt may read all vectors in the writer's thread, and a full disk stays full for long."""


class IndexRecovery:
    """The background task that lets searches see every committed change."""

    def __init__(
        self, collections: CollectionSet, indexes: GenerationIndexes, threads: StoreThreads
    ) -> None:
        self._collections = collections
        self._indexes = indexes
        self._threads = threads
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="index recovery")

    async def stop(self) -> None:
        """End after the step that is running."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            if not self._collections.is_stale and not self._indexes.needs_recovery:
                continue
            if not await attempted(log, "index: not recovered", self._threads.write(self._recover)):
                await asyncio.sleep(FAILURE_PAUSE_S)

    def _recover(self) -> None:
        if self._collections.is_stale:
            self._collections.reload()
        self._indexes.recover()
