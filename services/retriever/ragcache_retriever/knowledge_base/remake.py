"""Prepares documents again in the background, and removes what is no longer used.

After a change of the chunking, the tokenizer or the embedder, the old generation of chunks serves
while a task fills the next one. Documents that are prepared stay so, so a restarted process
continues. When all are, the collection switches in one transaction.

Two more tasks remove deleted collections and old chunks in steps, each with its deletes in the
outbox. They never wait for the first one: a removal frees space on a full disk, and needs no
embedder.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable

import numpy as np

from ragcache_core.errors import InvalidInput
from ragcache_retriever.concurrency.background import ItemTask, for_each
from ragcache_retriever.knowledge_base.collections import REMOVED_AT_ONCE, CollectionSet
from ragcache_retriever.knowledge_base.ingestion import Ingestion
from ragcache_retriever.store.records import ChunkSet, Generation, StoredCollection

log = logging.getLogger(__name__)

NUM_REMAKES = 4
"""Documents that are prepared at once, so that their texts share batches of the embedder."""
PAGE_SIZE = 256
"""Documents that are listed at a time."""
RETIRED_AT_ONCE = 512
"""Chunks that one transaction removes. Writes wait for it meanwhile."""
PAUSE_S = 0.01
"""Time between two of these transactions, in which the writes that wait go first."""


class Remake:
    """The background tasks of one knowledge base that writes."""

    def __init__(self, collections: CollectionSet, ingestion: Ingestion) -> None:
        self._collections = collections
        self._store = collections.store
        self._threads = collections.threads
        self._ingestion = ingestion
        self._remaking = ItemTask("remake", self._names, self._remake)
        self._removing = ItemTask("removal", self._names, self._remove_retired)
        self._deleting = ItemTask("deletion", self._names, self._delete)
        self._tasks = (self._remaking, self._removing, self._deleting)

    def start(self) -> None:
        """Begin, or look for work again."""
        for task in self._tasks:
            task.start()

    async def stop(self) -> None:
        """End after the transactions that are running."""
        for task in self._tasks:
            await task.stop()

    async def wait_until_idle(self) -> None:
        """Wait until there is no work."""
        while not all(task.is_idle for task in self._tasks):
            for task in self._tasks:
                await task.wait_until_idle()

    def _names(self) -> list[str]:
        return [stored.name for stored in self._collections.all()]

    # Documents that are prepared again

    async def _remake(self, name: str) -> None:
        """Let the documents of a collection have the wanted recipe."""
        stored = await self._threads.read(self._store.collections.one, name)
        if stored is None or stored.is_deleting:
            return
        stored = await self._threads.write(self._choose_generations, name)
        if stored.retired:
            self._removing.start()
        for generation in stored.generations:
            await self._fill(name, generation)
        if stored.building is None:
            return
        if await self._threads.write(self._switch, name):
            self._removing.start()
        else:
            self._remaking.start()  # a document came between

    def _choose_generations(self, name: str) -> StoredCollection:
        """Start or abandon the building generation, as the wanted recipe says."""
        stored = self._collections.get(name)
        wanted = self._collections.wanted_recipe(stored)
        serving, building = stored.serving, stored.building
        has_changed = True
        with self._store.database.transaction():
            if serving is None or (serving.recipe != wanted and building is None):
                self._store.collections.add_generation(name, wanted)
            elif building is not None and serving.recipe == wanted:
                self._store.collections.retire_building(name)
            elif building is not None and building.recipe != wanted:
                self._store.collections.add_generation(name, wanted)
            else:
                has_changed = False
            self._store.database.commit()
        if has_changed:
            self._collections.reload()
            log.info("remake: generations changed collection=%s", name)
        return self._collections.get(name)

    async def _fill(self, name: str, generation: Generation) -> None:
        """Prepare the documents that a generation lacks."""
        stored = await self._threads.read(self._store.collections.one, name)
        if stored is None or _is_complete(stored, generation.row):
            return  # without a look at each document
        after = ""
        while True:
            ids = await self._threads.read(
                self._store.reads.unprepared, name, generation.row, after, PAGE_SIZE
            )
            if not ids:
                return
            after = ids[-1]

            async def prepare(document_id: str) -> None:
                await self._prepare(name, document_id, generation)

            await for_each(ids, prepare, at_once=NUM_REMAKES)

    async def _prepare(self, name: str, document_id: str, generation: Generation) -> None:
        present = await self._threads.read(self._store.reads.get, name, document_id)
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
        stored = self._store.collections.one(name)
        if stored is None or stored.is_deleting:
            return  # the words of a collection that is being deleted have no table any more
        if all(one.row != generation for one in stored.generations):
            return
        with self._store.database.transaction():
            change = self._store.documents.put_chunks(
                name, document_id, content_hash, generation, chunks
            )
            self._store.database.commit()
        if change is not None:
            self._collections.indexes.apply([change])

    def _switch(self, name: str) -> bool:
        self._collections.get(name)  # raises NotFound if it is being deleted
        with self._store.database.transaction():
            has_switched = self._store.collections.switch_generation(name)
            self._store.database.commit()
        if has_switched:
            self._collections.reload()
            log.info("remake: switched collection=%s", name)
        return has_switched

    # What is no longer used

    async def _remove_retired(self, name: str) -> None:
        """Remove the old chunks of a collection."""
        stored = await self._threads.read(self._store.collections.one, name)
        if stored is None or stored.is_deleting:
            return
        for generation in stored.retired:
            await self._in_steps(functools.partial(self._remove_step, generation))
            await self._threads.write(self._collections.reload)

    def _remove_step(self, generation: int) -> bool:
        with self._store.database.transaction(frees_space=True):
            step = self._store.documents.remove_retired(
                generation, RETIRED_AT_ONCE, self._threads.now_ms()
            )
            self._store.database.commit()
        return step.is_done

    async def _delete(self, name: str) -> None:
        """Remove a deleted collection, and create the default one again if it was that."""
        stored = await self._threads.read(self._store.collections.one, name)
        if stored is not None:
            if not stored.is_deleting:
                return
            await self._in_steps(functools.partial(self._delete_step, name))
        # Also if an earlier attempt has removed the collection and failed then.
        await self._threads.write(self._collections.add_missing)

    def _delete_step(self, name: str) -> bool:
        with self._store.database.transaction(frees_space=True):
            step = self._store.documents.remove_of_collection(
                name, REMOVED_AT_ONCE, self._threads.now_ms()
            )
            if step.is_done:
                self._store.collections.drop(name)
                log.info("collections: deleted collection=%s", name)
            self._store.database.commit()
        return step.is_done

    async def _in_steps(self, step: Callable[[], bool]) -> None:
        """Repeat a transaction until it returns True. Other writes go in between."""
        while True:
            if await self._threads.write(step):
                return
            await asyncio.sleep(PAUSE_S)


def _is_complete(stored: StoredCollection, generation: int) -> bool:
    """Whether all documents are prepared in a generation, by the counters."""
    return any(
        one.row == generation and one.num_documents == stored.num_documents
        for one in stored.generations
    )
