"""Searches a collection in stages, and attaches texts to what the ranking finds.

A search uses one state of the index and takes no lock. If a write replaces or deletes a hit before
its text is read, the search waits until searches see the write, and runs again. So a stage never
mixes versions of a document, and the final one has all of a version or none of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from ragcache_core.errors import Unavailable
from ragcache_core.retrieval.filters import And
from ragcache_retriever.concurrency.query_gate import QueryGate
from ragcache_retriever.embedding.embedder import Embedder
from ragcache_retriever.knowledge_base.collections import CollectionSet
from ragcache_retriever.knowledge_base.filter_cache import FilterCache, FilterCancelled
from ragcache_retriever.knowledge_base.indexes import GenerationIndexes
from ragcache_retriever.knowledge_base.ingestion import document_not_found
from ragcache_retriever.knowledge_base.results import (
    RankedChunk,
    SearchQuery,
    SearchStage,
    SimilarChunk,
)
from ragcache_retriever.knowledge_base.store_threads import StoreThreads
from ragcache_retriever.preparer import DocumentPreparer
from ragcache_retriever.ranking.stages import RankedSearch, RankedStage, Ranking, SearchMode
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import Neighbourhood, Rows, Vectors

EVERYTHING = And(())
"""The filter that all documents pass."""
MAX_ATTEMPTS = 3
CHANGE_WAIT_S = 1.0
"""Longest wait for the write that has removed a hit. It is committed and needs milliseconds."""


@dataclass(slots=True)
class _RunningSearch:
    """A search in its thread.

    Attributes:
        vector: None if only words are compared.
        allowed: Generation and rows that pass the filter, as they were before the thread began.
            None: there is no filter.
        began_s: When it began, without waits for a thread.
    """

    query: SearchQuery
    vector: Vectors | None
    allowed: tuple[int, Rows] | None
    embed_s: float
    emit: Callable[[SearchStage], None]
    cancelled: threading.Event
    began_s: float


class Searching:
    """Answers searches of the knowledge base."""

    def __init__(
        self,
        store: DocumentStore,
        collections: CollectionSet,
        indexes: GenerationIndexes,
        threads: StoreThreads,
        embedder: Embedder,
        preparer: DocumentPreparer,
        ranking: Ranking,
        gate: QueryGate,
    ) -> None:
        self._store = store
        self._collections = collections
        self._indexes = indexes
        self._filters = FilterCache(store, indexes)
        self._threads = threads
        self._embedder = embedder
        self._preparer = preparer
        self._ranking = ranking
        self._gate = gate

    async def search(self, query: SearchQuery) -> AsyncIterator[SearchStage]:
        """Yield the stages of a search; the last one is final. See KnowledgeBase.search."""
        began = time.perf_counter()
        cancelled = threading.Event()
        with contextlib.ExitStack() as stack:
            # The gate stays closed from the first step to the last. Between the steps, ingestion
            # would otherwise resume and use all cores for milliseconds.
            stack.enter_context(self._gate.query())
            vector = await self._embed(query)
            embed_s = time.perf_counter() - began
            allowed = await self._allowed(query, cancelled)
            counted = stack.pop_all()
        filter_s = time.perf_counter() - began - embed_s

        loop = asyncio.get_running_loop()
        stages: asyncio.Queue[SearchStage | None] = asyncio.Queue()

        def emit(stage: SearchStage | None) -> None:
            # The loop is closed if the service stopped during a search.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stages.put_nowait, stage)

        def search() -> None:
            try:
                with counted:
                    if cancelled.is_set():
                        return  # its caller left while other searches held the threads
                    began_s = time.perf_counter() - filter_s
                    self._run(
                        _RunningSearch(query, vector, allowed, embed_s, emit, cancelled, began_s)
                    )
            finally:
                emit(None)

        # The thread does not wait for the reader of the stages, so a slow reader holds no thread.
        try:
            searching = loop.run_in_executor(self._threads.readers, search)
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
    ) -> list[list[SimilarChunk]]:
        """See KnowledgeBase.similar_chunks."""
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

    async def _embed(self, query: SearchQuery) -> Vectors | None:
        serving = self._collections.serving(query.collection)
        if query.mode is SearchMode.LEXICAL:
            return None
        if not self._preparer.can_embed(serving.recipe):
            if query.mode is SearchMode.DENSE:
                raise Unavailable(
                    "embedder",
                    f"the documents of collection {query.collection!r} are being prepared for"
                    " another one; search them by words meanwhile",
                    retry_after_s=30.0,
                )
            return None
        vectors = await self._embedder.embed([query.text], urgent=True)
        vector: Vectors = vectors[0]
        return vector

    async def _allowed(
        self, query: SearchQuery, cancelled: threading.Event
    ) -> tuple[int, Rows] | None:
        """Return the serving generation and its rows that pass the filter, if there is one.

        A filter may take seconds, so no thread that other searches need waits for it.
        """
        if query.filter is None:
            return None
        generation = self._collections.serving(query.collection).row
        request = functools.partial(
            self._filters.request, generation, query.filter, cancelled.is_set
        )
        # A store that is shared is asked for the version of its rows.
        is_shared = self._store.database.is_shared
        rows = await self._threads.read(request) if is_shared else request()
        if not rows.done():
            try:
                # Other searches may wait for the same rows.
                await asyncio.shield(asyncio.wrap_future(rows))
            except asyncio.CancelledError:
                cancelled.set()
                raise
        return generation, rows.result()

    def _run(self, search: _RunningSearch) -> None:
        collection = search.query.collection
        for attempt in range(1, MAX_ATTEMPTS + 1):
            num_published = self._indexes.num_published
            generation = self._collections.serving(collection).row
            is_last = attempt == MAX_ATTEMPTS
            failure: Unavailable | None = None
            try:
                if self._attempt(search, generation, is_first=attempt == 1, is_last=is_last):
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
        self, search: _RunningSearch, generation: int, *, is_first: bool, is_last: bool
    ) -> bool:
        """Search once. Return False, without a final stage, as soon as a hit has vanished."""
        query = search.query
        stored = self._collections.get(query.collection)
        window = self._collections.window(query.collection)
        allowed = None
        wanted = query.filter
        if wanted is None and self._indexes.is_behind(generation):
            # Such an index finds rows that no longer exist, if it may.
            wanted = EVERYTHING
        if wanted is not None:
            if is_first and search.allowed is not None and search.allowed[0] == generation:
                allowed = search.allowed[1]
            else:
                allowed = self._filters.allowed_rows(generation, wanted, search.cancelled.is_set)
        known: dict[int, Neighbourhood] = {}
        with contextlib.ExitStack() as stack:
            index = None
            if search.vector is not None:
                index = stack.enter_context(self._indexes.using(generation))
            ranked = RankedSearch(
                generation,
                query.text,
                search.vector,
                index,
                query.top_k,
                query.mode,
                stored.settings.lexical_weight,
                allowed,
                query.min_score,
                query.diversity,
                query.recall,
                search.cancelled.is_set,
            )
            for stage in self._ranking.stages(ranked, self._store):
                if search.cancelled.is_set():
                    return True
                hits = self._hits(stage, known, window)
                if len(hits) < len(stage.rows) and not is_last:
                    return False
                if stage.final or is_first:
                    search.emit(
                        SearchStage(
                            hits,
                            stage.final,
                            stage.progress,
                            stage.final_probability,
                            search.embed_s,
                            time.perf_counter() - search.began_s,
                        )
                    )
        return True

    def _hits(
        self, stage: RankedStage, known: dict[int, Neighbourhood], window: int
    ) -> tuple[RankedChunk, ...]:
        """Return the hits of a stage with their texts. Those that have vanished are left out."""
        new = [ranked.row for ranked in stage.rows if ranked.row not in known]
        known |= self._store.reads.neighbourhoods(new, window)
        duplicates = [row for ranked in stage.rows for row in ranked.duplicates]
        positions = self._store.reads.positions(duplicates) if duplicates else {}
        return tuple(
            RankedChunk(
                known[ranked.row],
                ranked.score,
                ranked.legs,
                tuple(positions[row] for row in ranked.duplicates if row in positions),
            )
            for ranked in stage.rows
            if ranked.row in known
        )

    def _similar(self, generation: int, vector: Vectors, top_k: int) -> list[SimilarChunk]:
        with self._indexes.using(generation) as index:
            *_, final = index.search(vector, top_k)
        positions = self._store.reads.positions(final.rows)
        return [
            SimilarChunk(*positions[row], score)
            for row, score in zip(final.rows, final.scores, strict=True)
            if row in positions
        ]
