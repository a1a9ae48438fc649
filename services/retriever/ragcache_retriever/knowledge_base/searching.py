"""Searches a collection in stages, and attaches texts to what the ranking finds.

A search uses one state of the index and takes no lock. If a write replaces or deletes a hit before
its text is read, the search waits until searches see the write, and runs again. So a stage never
mixes versions of a document, and the final one has all of a version or none of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from ragcache_core.errors import Unavailable
from ragcache_core.retrieval.filters import And
from ragcache_retriever.knowledge_base.collections import CollectionSet
from ragcache_retriever.knowledge_base.filter_cache import FilterCache, FilterCancelled
from ragcache_retriever.knowledge_base.ingestion import document_not_found
from ragcache_retriever.ranking.hybrid import HybridRanking
from ragcache_retriever.ranking.search import Search, SearchedChunks, SearchMode, SearchStage
from ragcache_retriever.store.records import Neighbourhood, Rows, Vectors
from ragcache_wire.v1 import retriever_pb2 as pb

EVERYTHING = And(())
"""The filter that all documents pass."""
MAX_ATTEMPTS = 3
CHANGE_WAIT_S = 1.0
"""Longest wait for the write that has removed a hit. It is committed and needs milliseconds."""


@dataclass(frozen=True, slots=True)
class _RunningSearch:
    """A search in its thread.

    Attributes:
        allowed: Generation and rows that pass the filter, as they were before the thread began.
            None: there is no filter.
        began_s: When it began, without waits for a thread.
    """

    search: Search
    allowed: tuple[int, Rows] | None
    embed_s: float
    began_s: float
    emit: Callable[[SearchStage], None]


class Searching:
    """Answers searches of the knowledge base."""

    def __init__(self, collections: CollectionSet, ranking: HybridRanking) -> None:
        self._collections = collections
        self._store = collections.store
        self._indexes = collections.indexes
        self._threads = collections.threads
        self._preparer = collections.preparer
        self._filters = FilterCache(collections.store, collections.indexes)
        self._ranking = ranking

    async def search(self, search: Search) -> AsyncIterator[SearchStage]:
        """Yield the stages of a search; the last one is final. Closing the iterator ends it.

        Raises:
            NotFound: There is no such collection.
            Unavailable: The embedder does not answer, or has been replaced by another one.
        """
        began = time.perf_counter()
        cancelled = threading.Event()
        with contextlib.ExitStack() as stack:
            # The gate stays closed from the first step to the last. Between the steps, ingestion
            # would otherwise resume and use all cores for milliseconds.
            stack.enter_context(self._preparer.gate.query())
            search = replace(search, vector=await self._embed(search), cancelled=cancelled.is_set)
            embed_s = time.perf_counter() - began
            allowed = await self._allowed(search, cancelled)
            counted = stack.pop_all()
        filter_s = time.perf_counter() - began - embed_s

        loop = asyncio.get_running_loop()
        stages: asyncio.Queue[SearchStage | None] = asyncio.Queue()

        def emit(stage: SearchStage | None) -> None:
            # The loop is closed if the service stopped during a search.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stages.put_nowait, stage)

        def run() -> None:
            try:
                with counted:
                    if cancelled.is_set():
                        return  # its caller left while other searches held the threads
                    began_s = time.perf_counter() - filter_s
                    self._run(_RunningSearch(search, allowed, embed_s, began_s, emit))
            finally:
                emit(None)

        # The thread does not wait for the reader of the stages, so a slow reader holds no thread.
        try:
            context = contextvars.copy_context()
            searching = loop.run_in_executor(self._threads.readers, context.run, run)
        except RuntimeError:  # the threads have ended
            counted.close()
            raise
        searching.add_done_callback(lambda _: counted.close())  # also if it never began
        try:
            while (stage := await stages.get()) is not None:
                yield stage
            await searching
        finally:
            cancelled.set()

    def close(self) -> None:
        """End the evaluation of filters. No search may run any more."""
        self._filters.close()

    async def similar_chunks(
        self, name: str, document_id: str, top_k: int
    ) -> list[list[pb.SimilarChunk]]:
        """Return the most similar chunks for each chunk of a document, best first.

        Raises:
            NotFound: There is no such collection or document.
        """
        generation = self._collections.serving(name).row
        if await self._threads.read(self._store.reads.find, name, document_id) is None:
            raise document_not_found(document_id, name)
        chunks = await self._threads.read(
            self._store.embeddings.of_document, name, document_id, generation
        )
        found = []
        for ordinal, (_, vector) in enumerate(chunks):
            # One chunk at a time, so that searches of questions come between them.
            similar = await self._threads.read(self._similar, generation, vector, top_k + 1)
            own = (document_id, ordinal)
            others = [one for one in similar if (one.document_id, one.ordinal) != own]
            found.append(others[:top_k])
        return found

    async def _embed(self, search: Search) -> Vectors | None:
        serving = self._collections.serving(search.collection)
        if search.mode is SearchMode.LEXICAL:
            return None
        if not self._preparer.can_embed(serving.recipe):
            if search.mode is SearchMode.DENSE:
                raise Unavailable(
                    "embedder",
                    f"the documents of collection {search.collection!r} are being prepared for"
                    " another one; search them by words meanwhile",
                    retry_after_s=30.0,
                )
            return None
        vectors = await self._preparer.embedder.embed([search.text], urgent=True)
        vector: Vectors = vectors[0]
        return vector

    async def _allowed(self, search: Search, cancelled: threading.Event) -> tuple[int, Rows] | None:
        """Return the serving generation and its rows that pass the filter, if there is one.

        A filter may take seconds, so no thread that other searches need waits for it.
        """
        if search.filter is None:
            return None
        generation = self._collections.serving(search.collection).row
        request = functools.partial(
            self._filters.request, generation, search.filter, search.cancelled
        )
        # A store that is shared is asked for the version of its rows.
        is_shared = self._store.database.is_shared
        rows = await self._threads.read(request) if is_shared else request()
        if not rows.done():
            try:
                # Other searches may wait for the same rows.
                await asyncio.shield(_observed(asyncio.wrap_future(rows)))
            except asyncio.CancelledError:
                cancelled.set()
                raise
        return generation, rows.result()

    def _run(self, running: _RunningSearch) -> None:
        collection = running.search.collection
        for attempt in range(1, MAX_ATTEMPTS + 1):
            num_published = self._indexes.num_published
            generation = self._collections.serving(collection).row
            is_last = attempt == MAX_ATTEMPTS
            failure: Unavailable | None = None
            try:
                if self._attempt(running, generation, is_first=attempt == 1, is_last=is_last):
                    return
            except FilterCancelled:
                return
            except Unavailable as error:
                failure = error
            self._indexes.wait_for_change(num_published, CHANGE_WAIT_S)
            has_switched = self._collections.serving(collection).row != generation
            if failure is not None and (is_last or not has_switched):
                raise failure

    def _attempt(
        self, running: _RunningSearch, generation: int, *, is_first: bool, is_last: bool
    ) -> bool:
        """Search once. Return False, without a final stage, as soon as a hit has vanished."""
        search = running.search
        settings = self._collections.get(search.collection).settings
        window = self._collections.window(search.collection)
        allowed = self._rows_to_search(running, generation, is_first=is_first)
        known: dict[int, Neighbourhood] = {}
        with contextlib.ExitStack() as stack:
            index = None
            if search.vector is not None:
                index = stack.enter_context(self._indexes.using(generation))
            chunks = SearchedChunks(
                self._store, generation, index, settings.lexical_weight, allowed
            )
            for stage in self._ranking.stages(search, chunks):
                if search.cancelled():
                    return True
                shown = self._with_texts(stage, known, window)
                if len(shown.hits) < len(stage.hits) and not is_last:
                    return False
                if stage.final or is_first:
                    search_s = time.perf_counter() - running.began_s
                    running.emit(replace(shown, embed_s=running.embed_s, search_s=search_s))
        return True

    def _rows_to_search(
        self, running: _RunningSearch, generation: int, *, is_first: bool
    ) -> Rows | None:
        wanted = running.search.filter
        if wanted is None and self._indexes.is_behind(generation):
            # Such an index finds rows that no longer exist, if it may.
            wanted = EVERYTHING
        if wanted is None:
            return None
        if is_first and running.allowed is not None and running.allowed[0] == generation:
            return running.allowed[1]
        return self._filters.allowed_rows(generation, wanted, running.search.cancelled)

    def _with_texts(
        self, stage: SearchStage, known: dict[int, Neighbourhood], window: int
    ) -> SearchStage:
        """Return a stage with its texts. Hits that have vanished are left out."""
        known |= self._store.reads.neighbourhoods(
            [hit.row for hit in stage.hits if hit.row not in known], window
        )
        duplicates = [row for hit in stage.hits for row in hit.duplicates]
        positions = self._store.reads.positions(duplicates) if duplicates else {}
        hits = tuple(hit for hit in stage.hits if hit.row in known)
        texts = {hit.row: known[hit.row] for hit in hits}
        return replace(stage, hits=hits, texts=texts, positions=positions)

    def _similar(self, generation: int, vector: Vectors, top_k: int) -> list[pb.SimilarChunk]:
        with self._indexes.using(generation) as index:
            *_, final = index.search(vector, top_k)
        positions = self._store.reads.positions(final.rows)
        return [
            pb.SimilarChunk(document_id=positions[row][0], ordinal=positions[row][1], score=score)
            for row, score in zip(final.rows, final.scores, strict=True)
            if row in positions
        ]


def _observed(rows: asyncio.Future[Rows]) -> asyncio.Future[Rows]:
    """Return a future whose error is not logged if the search that waits for it has left."""
    rows.add_done_callback(lambda done: done.cancelled() or done.exception())
    return rows
