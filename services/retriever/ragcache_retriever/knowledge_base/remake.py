"""Prepares documents again in the background, and removes what is no longer used.

After a change of the chunking, the tokenizer or the embedder, the old generation of chunks serves
while this task fills the next one. Documents that are prepared stay so, so a restarted process
continues. When all are, the collection switches in one transaction, and the old chunks are removed
in steps, each with its deletes in the outbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import numpy as np

from ragcache_core.errors import InvalidInput, NotFound, RagCacheError, Unavailable
from ragcache_retriever.concurrency.bounded import for_each
from ragcache_retriever.knowledge_base.collections import REMOVED_AT_ONCE, CollectionSet
from ragcache_retriever.knowledge_base.indexes import GenerationIndexes
from ragcache_retriever.knowledge_base.ingestion import Ingestion
from ragcache_retriever.knowledge_base.store_threads import StoreThreads
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import (
    BatchRemoval,
    ChunkSet,
    Generation,
    StoredCollection,
)

log = logging.getLogger(__name__)

NUM_REMAKES = 4
"""Documents that are prepared at once, so that their texts share batches of the embedder."""
PAGE_SIZE = 256
"""Documents that are listed at a time."""
RETIRED_AT_ONCE = 512
"""Chunks that one transaction removes. Writes wait for it meanwhile."""
FAILURE_PAUSE_S = 10.0
PAUSE_S = 0.01
"""Time between two of these transactions, in which the writes that wait go first."""


class Remake:
    """The background task of one knowledge base that writes."""

    def __init__(
        self,
        store: DocumentStore,
        collections: CollectionSet,
        indexes: GenerationIndexes,
        threads: StoreThreads,
        ingestion: Ingestion,
    ) -> None:
        self._store = store
        self._collections = collections
        self._indexes = indexes
        self._threads = threads
        self._ingestion = ingestion
        self._has_work = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, or look for work again."""
        self._is_idle.clear()
        self._has_work.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="remake")

    async def stop(self) -> None:
        """End after the transaction that is running."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def wait_until_idle(self) -> None:
        """Wait until there is no work."""
        await self._is_idle.wait()

    async def _run(self) -> None:
        while True:
            self._has_work.clear()
            try:
                for stored in self._collections.all():
                    await self._work_on(stored.name)
            except NotFound:  # a collection was deleted meanwhile
                await asyncio.sleep(PAUSE_S)
                continue
            except RagCacheError as error:
                retry_after_s = error.retry_after_s if isinstance(error, Unavailable) else 10.0
                log.warning("remake: interrupted error=%s", error)
                await asyncio.sleep(retry_after_s)
                continue
            except Exception:
                # A defect must not end the task for the life of the process.
                log.exception("remake: failed")
                await asyncio.sleep(FAILURE_PAUSE_S)
                continue
            if not self._has_work.is_set():
                self._is_idle.set()
                await self._has_work.wait()

    async def _work_on(self, name: str) -> None:
        stored = await self._threads.read(self._store.collection, name)
        if stored is None:
            return
        if stored.is_deleting:
            await self._delete(name)
            return
        stored = await self._threads.write(self._choose_generations, name)
        for generation in stored.generations:
            await self._fill(name, generation)
        if stored.building is not None and not await self._threads.write(self._switch, name):
            self._has_work.set()  # a document came between
            return
        stored = await self._threads.read(self._store.collection, name)
        for retired in () if stored is None else stored.retired:
            await self._remove_retired(retired)

    def _choose_generations(self, name: str) -> StoredCollection:
        """Start or abandon the building generation, as the wanted recipe says."""
        stored = self._collections.get(name)
        wanted = self._collections.wanted_recipe(stored)
        serving, building = stored.serving, stored.building
        has_changed = True
        with self._store.transaction():
            if serving is None or (serving.recipe != wanted and building is None):
                self._store.add_generation(name, wanted)
            elif building is not None and serving.recipe == wanted:
                self._store.retire_building(name)
            elif building is not None and building.recipe != wanted:
                self._store.add_generation(name, wanted)
            else:
                has_changed = False
            self._store.commit()
        if has_changed:
            self._collections.reload()
            log.info("remake: generations changed collection=%s", name)
        return self._collections.get(name)

    async def _fill(self, name: str, generation: Generation) -> None:
        """Prepare the documents that a generation lacks."""
        stored = await self._threads.read(self._store.collection, name)
        if stored is None or _is_complete(stored, generation.row):
            return  # without a look at each document
        after = ""
        while True:
            ids = await self._threads.read(
                self._store.unprepared, name, generation.row, after, PAGE_SIZE
            )
            if not ids:
                return
            after = ids[-1]

            async def prepare(document_id: str) -> None:
                await self._prepare(name, document_id, generation)

            await for_each(ids, prepare, at_once=NUM_REMAKES)

    async def _prepare(self, name: str, document_id: str, generation: Generation) -> None:
        present = await self._threads.read(self._store.get, name, document_id)
        if present is None:
            return
        try:
            chunks = await self._ingestion.prepare(name, present.document, present, generation)
        except InvalidInput as error:
            # One document must not block the others. An upsert of it tries again.
            log.warning(
                "remake: document left out collection=%s document=%r error=%s",
                name,
                document_id,
                error,
            )
            chunks = ChunkSet(generation.recipe.tokenizer, [], [], [], np.empty((0, 0), np.float32))
        content_hash = present.content_hash
        await self._threads.write(
            self._put_chunks, name, document_id, content_hash, generation.row, chunks
        )

    def _put_chunks(
        self, name: str, document_id: str, content_hash: str, generation: int, chunks: ChunkSet
    ) -> None:
        stored = self._store.collection(name)
        if stored is None or stored.is_deleting:
            return  # the words of a collection that is being deleted have no table any more
        if all(one.row != generation for one in stored.generations):
            return
        with self._store.transaction():
            change = self._store.put_chunks(name, document_id, content_hash, generation, chunks)
            self._store.commit()
        if change is not None:
            self._indexes.apply([change])

    def _switch(self, name: str) -> bool:
        with self._store.transaction():
            has_switched = self._store.switch_generation(name)
            self._store.commit()
        if has_switched:
            self._collections.reload()
            log.info("remake: switched collection=%s", name)
        return has_switched

    async def _remove_retired(self, generation: int) -> None:
        while True:
            step = await self._threads.write(self._remove_step, generation)
            if step.is_done:
                break
            await asyncio.sleep(PAUSE_S)
        await self._threads.write(self._collections.reload)

    def _remove_step(self, generation: int) -> BatchRemoval:
        with self._store.transaction(frees_space=True):
            step = self._store.remove_retired(generation, RETIRED_AT_ONCE, self._threads.now_ms())
            self._store.commit()
        return step

    async def _delete(self, name: str) -> None:
        while True:
            if await self._threads.write(self._delete_step, name):
                break
            await asyncio.sleep(PAUSE_S)
        await self._threads.write(self._collections.add_missing)

    def _delete_step(self, name: str) -> bool:
        with self._store.transaction(frees_space=True):
            step = self._store.remove_documents(name, REMOVED_AT_ONCE, self._threads.now_ms())
            if step.is_done:
                self._store.drop_collection(name)
                log.info("collections: deleted collection=%s", name)
            self._store.commit()
        return step.is_done


def _is_complete(stored: StoredCollection, generation: int) -> bool:
    """Whether all documents are prepared in a generation, by the counters."""
    return any(
        one.row == generation and one.num_documents == stored.num_documents
        for one in stored.generations
    )
