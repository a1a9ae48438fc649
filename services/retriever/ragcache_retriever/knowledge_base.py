"""Keeps documents, chunks, embeddings and indexes consistent.

One writer thread changes SQLite and the indexes. A few reader threads search and read. Processes of
their own split documents, and the embedder embeds wherever it runs. The event loop only waits.

A document is split and embedded before its transaction begins, so a long ingest delays neither
searches nor other writes. The transaction commits and the index changes under the collection's
lock, so no search sees one without the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from ragcache_core.errors import InvalidInput, NotFound, Unavailable
from ragcache_retriever.concurrency.bounded import for_each
from ragcache_retriever.concurrency.query_gate import QueryGate
from ragcache_retriever.concurrency.read_write_lock import ReadWriteLock
from ragcache_retriever.concurrency.threads import finish, run
from ragcache_retriever.documents.collection import (
    DEFAULT_COLLECTION,
    Chunking,
    CollectionDefaults,
    CollectionSettings,
)
from ragcache_retriever.documents.document_store import (
    ChunkChange,
    Document,
    DocumentStore,
    Neighbourhood,
    Recipe,
    StoredDocument,
)
from ragcache_retriever.documents.outbox import OutboxClaim, OutboxDelete, Removal
from ragcache_retriever.documents.splitter import SplitLimit
from ragcache_retriever.documents.tokenizer import ServingTokenizer
from ragcache_retriever.embedding.embedder import Embedder, Vectors
from ragcache_retriever.preparer import DocumentPreparer, PreparedDocument, embedded_text
from ragcache_retriever.search.index import Probing, StagedIndex, use_one_thread

log = logging.getLogger(__name__)

NUM_READERS = 4
NUM_REBUILDS = 8
"""Documents that are rebuilt at once, so that their texts share batches of the embedder."""


@dataclass(frozen=True, slots=True)
class CollectionInfo:
    """A collection and the settings that apply to it, defaults included."""

    name: str
    chunking: Chunking
    window: int
    num_documents: int
    num_chunks: int


@dataclass(frozen=True, slots=True)
class UpsertResult:
    """Result of an upsert.

    ``stored`` is the document after the upsert. ``deletes`` are those that the caller is to send,
    which include pending ones of earlier upserts. ``sequence`` is that of the last removal before
    or by a change. ``texts`` are the document's chunks, if it changed.
    """

    stored: StoredDocument
    changed: bool
    deletes: tuple[OutboxDelete, ...]
    sequence: int = 0
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankedChunk:
    """A hit: a chunk with its neighbours, and its cosine similarity with the query."""

    neighbourhood: Neighbourhood
    score: float


@dataclass(frozen=True, slots=True)
class SearchStage:
    """Hits of one stage, best first.

    ``embed_s`` and ``search_s`` are the times until its end.
    """

    hits: tuple[RankedChunk, ...]
    final: bool
    progress: float
    embed_s: float
    search_s: float


@dataclass(frozen=True, slots=True)
class SimilarChunk:
    """A chunk that is similar to another one, by its position in its document."""

    document_id: str
    ordinal: int
    score: float


@dataclass(slots=True)
class _LoadedCollection:
    """A collection in memory. The lock protects the index from changes during a search."""

    settings: CollectionSettings
    index: StagedIndex
    lock: ReadWriteLock = field(default_factory=ReadWriteLock)
    changing_settings: asyncio.Lock = field(default_factory=asyncio.Lock)


class KnowledgeBase:
    """All collections of the service. It refuses calls until ``load`` has returned.

    Args:
        markdown: The content type whose headings and code fences are recognized.
        gate: The gate of the embedder, if that runs in this process.
        split_limit: CPU time in which a document has to be split.
    """

    def __init__(
        self,
        store: DocumentStore,
        embedder: Embedder,
        tokenizer: ServingTokenizer,
        defaults: CollectionDefaults,
        *,
        markdown: int,
        gate: QueryGate | None = None,
        split_limit: SplitLimit | None = None,
        probing: Probing | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._embedder = embedder
        self._gate = gate or QueryGate()
        self._preparer = DocumentPreparer(embedder, tokenizer, markdown, split_limit)
        self._defaults = defaults
        self._probing = probing or Probing()
        self._clock = clock
        self._loaded = False
        self._collections: dict[str, _LoadedCollection] = {}
        self._document_locks: weakref.WeakValueDictionary[tuple[str, str], asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )
        self._writer = ThreadPoolExecutor(1, "writer", use_one_thread)
        self._readers = ThreadPoolExecutor(NUM_READERS, "reader", use_one_thread)

    async def load(self, progress: Callable[[str], None] = log.debug) -> None:
        """Start the embedder, build the indexes, and prepare stale documents again.

        Args:
            progress: Receives the state of the load in words.

        Raises:
            Unavailable: The embedder does not answer, or documents cannot be split now. The caller
                may call again.
        """
        progress("loading the embedder")
        await self._embedder.start()
        progress("loading the index")
        stored = await run(self._readers, self._store.collections)
        if DEFAULT_COLLECTION not in stored:
            settings = CollectionSettings()
            await run(self._writer, self._put_settings, DEFAULT_COLLECTION, settings)
            stored[DEFAULT_COLLECTION] = settings
        for name, settings in stored.items():
            self._collections[name] = _LoadedCollection(settings, self._empty_index())
            self._collections[name].index = await run(self._readers, self._built_index, name)
        stale = [(name, document) for name in stored for document in await self._stale(name)]
        number = itertools.count(1)

        async def rebuild(name_and_id: tuple[str, str]) -> None:
            progress(f"indexing {next(number)} of {len(stale)}")
            await self._rebuild_document(*name_and_id)

        await for_each(stale, rebuild, at_once=NUM_REBUILDS)
        self._loaded = True

    async def close(self) -> None:
        """Wait for the running write, then release threads, embedder and files."""
        await self._preparer.close()
        await finish(self._readers)
        await finish(self._writer)
        await self._embedder.close()
        self._store.close()

    # Collections

    async def put_collection(self, name: str, settings: CollectionSettings) -> CollectionInfo:
        """Create a collection or change it. Its documents are split by its settings afterwards."""
        self._check_loaded()
        collection = self._collections.get(name)
        if collection is None:
            collection = _LoadedCollection(settings, self._empty_index())
            await run(self._writer, self._put_settings, name, settings)
            collection = self._collections.setdefault(name, collection)
        async with collection.changing_settings:
            if settings != collection.settings:
                await run(self._writer, self._put_settings, name, settings)
                collection.settings = settings
            # Even without a change: an earlier put may have been interrupted.
            rebuild = functools.partial(self._rebuild_document, name)
            await for_each(await self._stale(name), rebuild, at_once=NUM_REBUILDS)
        return await self.collection(name)

    async def collection(self, name: str) -> CollectionInfo:
        """Return a collection. Raises NotFound."""
        settings = self._collection(name).settings
        num_documents, num_chunks = await run(self._readers, self._store.counts, name)
        return CollectionInfo(
            name,
            self._defaults.chunking_of(settings),
            self._defaults.window_of(settings),
            num_documents,
            num_chunks,
        )

    async def collections(self) -> list[CollectionInfo]:
        """Return all collections, sorted by name."""
        self._check_loaded()
        return [await self.collection(name) for name in sorted(self._collections)]

    # Documents

    async def upsert(self, collection: str, document: Document) -> UpsertResult:
        """Insert or replace a document. It is durable and searchable afterwards.

        Raises:
            NotFound: There is no such collection.
            InvalidInput: The document takes too long to split, or the embedder refuses it.
            Unavailable: The embedder does not answer, the document cannot be split now, or the
                disk is full.
        """
        self._collection(collection)
        content_hash = await run(self._readers, document.content_hash)
        async with self._document_lock(collection, document.id):
            result = await self._put(collection, document, content_hash, claim=True)
        if not result.changed:
            # The gateway of the first attempt may have ended before it sent the deletes.
            pending = await run(self._writer, self._claim_of, collection, document.id)
            result = replace(result, deletes=pending or ())
        return result

    async def delete(self, collection: str, document_id: str) -> tuple[OutboxDelete, ...]:
        """Delete a document.

        A repeated delete succeeds while the outbox knows of the first one, and returns what is
        pending of it.

        Returns:
            The deletes that the caller is to send.

        Raises:
            NotFound: There is no such collection or document.
        """
        self._collection(collection)
        async with self._document_lock(collection, document_id):
            deletes = await run(self._writer, self._delete, collection, document_id)
        if deletes is None:
            raise _document_not_found(document_id, collection)
        return deletes

    # Outbox. It also serves while the indexes are loaded, which may remove text.

    async def removals(self, after: int, limit: int) -> tuple[list[Removal], int]:
        """Return the removals after a sequence, oldest first, and the sequence of the last one."""
        return await run(self._readers, self._store.removals, after, limit)

    async def claim_deletes(self, limit: int) -> OutboxClaim:
        """Return pending deletes that no other caller is sending."""
        return await run(self._writer, self._claim, limit)

    async def acknowledge_deletes(
        self, complete: Sequence[bytes], partial: Sequence[bytes]
    ) -> None:
        """Record which deletes every shard, or at least one, has acknowledged."""
        await run(self._writer, self._acknowledge, complete, partial)

    # Documents, read

    async def document(self, collection: str, document_id: str) -> StoredDocument:
        """Return a document with its text. Raises NotFound."""
        self._collection(collection)
        stored = await run(self._readers, self._store.get, collection, document_id)
        if stored is None:
            raise _document_not_found(document_id, collection)
        return stored

    async def documents(
        self, collection: str, after: str, limit: int
    ) -> tuple[list[StoredDocument], str | None]:
        """Return a page of documents (see DocumentStore.page). Raises NotFound."""
        self._collection(collection)
        return await run(self._readers, self._store.page, collection, after, limit)

    # Search

    async def search(self, name: str, query: str, top_k: int) -> AsyncIterator[SearchStage]:
        """Yield the stages of a search; the last one is final. Raises NotFound, Unavailable."""
        collection = self._collection(name)
        began = time.perf_counter()
        vector = (await self._embedder.embed([query], urgent=True))[0]
        embed_s = time.perf_counter() - began

        loop = asyncio.get_running_loop()
        stages: asyncio.Queue[SearchStage | None] = asyncio.Queue()
        cancelled = threading.Event()

        def emit(stage: SearchStage | None) -> None:
            # The loop is closed if the service stopped during a search.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stages.put_nowait, stage)

        def search() -> None:
            try:
                with self._gate.query():
                    self._search(collection, vector, top_k, embed_s, emit, cancelled)
            finally:
                emit(None)

        # The thread does not wait for the reader of the stages, so a slow reader holds no lock.
        searching = loop.run_in_executor(self._readers, search)
        try:
            while (stage := await stages.get()) is not None:
                yield stage
            await searching
        finally:
            cancelled.set()

    def _search(
        self,
        collection: _LoadedCollection,
        vector: Vectors,
        top_k: int,
        embed_s: float,
        emit: Callable[[SearchStage], None],
        cancelled: threading.Event,
    ) -> None:
        window = self._defaults.window_of(collection.settings)
        known: dict[int, Neighbourhood] = {}
        began = time.perf_counter()
        with collection.lock.reading():
            for stage in collection.index.search(vector, top_k):
                if cancelled.is_set():
                    return
                new = [row for row in stage.rows if row not in known]
                known |= self._store.neighbourhoods(new, window)
                emit(
                    SearchStage(
                        hits=tuple(
                            RankedChunk(known[row], score)
                            for row, score in zip(stage.rows, stage.scores, strict=True)
                        ),
                        final=stage.final,
                        progress=stage.progress,
                        embed_s=embed_s,
                        search_s=time.perf_counter() - began,
                    )
                )

    async def similar_chunks(
        self, name: str, document_id: str, top_k: int
    ) -> list[list[SimilarChunk]]:
        """Return the most similar chunks for each chunk of a document, best first.

        Raises:
            NotFound: There is no such collection or document.
        """
        collection = self._collection(name)
        stored = await run(self._readers, self._store.get, name, document_id)
        if stored is None:
            raise _document_not_found(document_id, name)
        chunks = await run(self._readers, self._store.embedded, name, document_id)
        found = []
        for ordinal, (_, vector) in enumerate(chunks):
            # One chunk at a time, so that searches of questions come between them.
            similar = await run(self._readers, self._similar, collection, vector, top_k + 1)
            own = (document_id, ordinal)
            others = [one for one in similar if (one.document_id, one.ordinal) != own]
            found.append(others[:top_k])
        return found

    def _similar(
        self, collection: _LoadedCollection, vector: Vectors, top_k: int
    ) -> list[SimilarChunk]:
        with collection.lock.reading():
            *_, final = collection.index.search(vector, top_k)
            positions = self._store.positions(final.rows)
        return [
            SimilarChunk(*positions[row], score)
            for row, score in zip(final.rows, final.scores, strict=True)
            if row in positions
        ]

    # Reports

    async def put_report(self, name: str, body: bytes) -> None:
        """Store a report durably in place of the one of its name."""
        self._check_loaded()
        await run(self._writer, self._put_report, name, body)

    async def report(self, name: str) -> tuple[bytes, int]:
        """Return a report and the Unix milliseconds of its last change. Raises NotFound."""
        self._check_loaded()
        found = await run(self._readers, self._store.report, name)
        if found is None:
            raise NotFound("report", name, "put it first")
        return found

    # Writes

    async def _put(
        self, collection: str, document: Document, content_hash: str, *, claim: bool
    ) -> UpsertResult:
        """Upsert a document. The caller holds the document's lock."""
        while True:
            # The writer thread reads: a write whose caller was cancelled may still be running.
            present = await run(self._writer, self._store.get, collection, document.id)
            updated_unix_ms = self._now_ms()
            if present is not None and present.content_hash == content_hash:
                if present.recipe == self._recipe(collection):
                    return UpsertResult(present, changed=False, deletes=())
                updated_unix_ms = present.updated_unix_ms
            prepared = await self._prepare(collection, document, present)
            stored = StoredDocument(
                document, content_hash, prepared.recipe, len(prepared.chunks), updated_unix_ms
            )
            write = functools.partial(self._write, collection, stored, prepared, claim=claim)
            change = await run(self._writer, write)
            if change is not None:
                texts = tuple(chunk.text for chunk in prepared.chunks)
                return UpsertResult(stored, True, change.deletes, change.sequence, texts)

    async def _prepare(
        self, collection: str, document: Document, present: StoredDocument | None
    ) -> PreparedDocument:
        """Split and embed a document. Texts of its present chunks are not embedded again."""
        known: dict[str, Vectors] = {}
        if present is not None and present.recipe.embedder == self._recipe(collection).embedder:
            known = await run(self._readers, self._known_embeddings, collection, present)
        chunking = self._defaults.chunking_of(self._collections[collection].settings)
        return await self._preparer.prepare(document, chunking, known)

    def _known_embeddings(self, collection: str, present: StoredDocument) -> dict[str, Vectors]:
        title = present.document.title
        embedded = self._store.embedded(collection, present.document.id)
        return {embedded_text(title, chunk): vector for chunk, vector in embedded}

    def _write(
        self, name: str, stored: StoredDocument, prepared: PreparedDocument, *, claim: bool
    ) -> ChunkChange | None:
        """Replace a document. Return None if its collection changed since it was prepared."""
        if stored.recipe != self._recipe(name):
            return None
        with self._store.transaction():
            change = self._store.replace(
                name,
                stored,
                prepared.chunks,
                prepared.digests,
                prepared.embeddings,
                now_ms=self._now_ms(),
                claim=claim,
            )
            self._publish(self._collections[name], change, prepared.embeddings)
        return change

    def _delete(self, name: str, document_id: str) -> tuple[OutboxDelete, ...] | None:
        with self._store.transaction():
            change = self._store.delete(name, document_id, self._now_ms())
            if change is not None:
                no_vectors = np.empty((0, self._embedder.dimension), np.float32)
                self._publish(self._collections[name], change, no_vectors)
                return change.deletes
        return self._claim_of(name, document_id)

    def _claim_of(self, name: str, document_id: str) -> tuple[OutboxDelete, ...] | None:
        """Claim the pending deletes of a document; None if the outbox does not know it."""
        with self._store.transaction():
            if not self._store.outbox.knows(name, document_id):
                return None
            pending = self._store.outbox.claim_of(
                name, document_id, self._now_ms(), is_repeated=True
            )
            self._store.commit()
        return pending

    def _claim(self, limit: int) -> OutboxClaim:
        with self._store.transaction():
            claim = self._store.outbox.claim(limit, self._now_ms())
            self._store.commit()
        return claim

    def _acknowledge(self, complete: Sequence[bytes], partial: Sequence[bytes]) -> None:
        with self._store.transaction():
            self._store.outbox.acknowledge(complete, partial, self._now_ms())
            self._store.commit()

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    def _publish(
        self, collection: _LoadedCollection, change: ChunkChange, vectors: Vectors
    ) -> None:
        """Commit a change and make it visible to searches."""
        with collection.lock.writing():
            self._store.commit()
            collection.index.replace(change.removed, change.added, vectors)
        if collection.index.outgrown:
            # Only this thread changes indexes, so the old one serves until the new one is built.
            retrained = collection.index.retrained()
            with collection.lock.writing():
                collection.index = retrained

    def _put_settings(self, name: str, settings: CollectionSettings) -> None:
        with self._store.transaction():
            self._store.put_collection(name, settings)
            self._store.commit()

    def _put_report(self, name: str, body: bytes) -> None:
        with self._store.transaction():
            self._store.put_report(name, body, self._now_ms())
            self._store.commit()

    async def _stale(self, name: str) -> list[str]:
        """Return the ids of documents of a collection that another recipe prepared."""
        stale = await run(self._writer, self._store.stale, name, self._recipe(name))
        if stale:
            log.info(
                "knowledge base: rebuilding documents collection=%s count=%d", name, len(stale)
            )
        return stale

    async def _rebuild_document(self, name: str, document_id: str) -> None:
        async with self._document_lock(name, document_id):
            present = await run(self._writer, self._store.get, name, document_id)
            if present is None:
                return
            try:
                await self._put(name, present.document, present.content_hash, claim=False)
            except InvalidInput as error:
                # One document must not block the others.
                log.warning(
                    "knowledge base: rebuild failed collection=%s document=%r error=%s",
                    name,
                    document_id,
                    error,
                )

    # Helpers

    def _check_loaded(self) -> None:
        if not self._loaded:
            raise Unavailable("retriever", "it is loading its index and its embedder")

    def _collection(self, name: str) -> _LoadedCollection:
        self._check_loaded()
        collection = self._collections.get(name)
        if collection is None:
            raise NotFound("collection", name, "create it with PutCollection, or use 'default'")
        return collection

    def _document_lock(self, collection: str, document_id: str) -> asyncio.Lock:
        return self._document_locks.setdefault((collection, document_id), asyncio.Lock())

    def _recipe(self, collection: str) -> Recipe:
        """Return the recipe of the collection's documents."""
        settings = self._collections[collection].settings
        return self._preparer.recipe(self._defaults.chunking_of(settings))

    def _built_index(self, name: str) -> StagedIndex:
        rows, vectors = self._store.embeddings(name, self._recipe(name).embedder)
        if not len(rows):
            return self._empty_index()
        return StagedIndex(self._embedder.dimension, rows, vectors, self._probing)

    def _empty_index(self) -> StagedIndex:
        dimension = self._embedder.dimension
        no_vectors = np.empty((0, dimension), np.float32)
        return StagedIndex(dimension, np.empty(0, np.int64), no_vectors, self._probing)


def _document_not_found(document_id: str, collection: str) -> NotFound:
    return NotFound(
        "document", document_id, f"list the documents of collection {collection!r} for their ids"
    )
