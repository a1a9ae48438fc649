"""The knowledge base: the entry for all calls of the service.

One writer thread changes documents and indexes. A few reader threads search and read. Processes of
their own split documents, and the embedder embeds wherever it runs. The event loop only waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence

from ragcache_core.errors import NotFound
from ragcache_core.retrieval.fusion import Scores
from ragcache_retriever.concurrency.query_gate import QueryGate
from ragcache_retriever.documents.collection import CollectionDefaults, CollectionSettings
from ragcache_retriever.documents.splitter import SplitLimit
from ragcache_retriever.documents.tokenizer import ServingTokenizer
from ragcache_retriever.embedding.embedder import Embedder
from ragcache_retriever.knowledge_base.catch_up import IndexCatchUp
from ragcache_retriever.knowledge_base.collections import CollectionSet
from ragcache_retriever.knowledge_base.indexes import GenerationIndexes
from ragcache_retriever.knowledge_base.ingestion import Ingestion, document_not_found
from ragcache_retriever.knowledge_base.refresh import CollectionRefresh
from ragcache_retriever.knowledge_base.remake import Remake
from ragcache_retriever.knowledge_base.results import (
    CollectionInfo,
    CollectionRemoval,
    IndexInfo,
    SearchQuery,
    SearchStage,
    SimilarChunk,
    UpsertResult,
)
from ragcache_retriever.knowledge_base.searching import Searching
from ragcache_retriever.knowledge_base.store_threads import StoreThreads
from ragcache_retriever.preparer import DocumentPreparer
from ragcache_retriever.ranking.stages import Ranking
from ragcache_retriever.ranking.text_scores import score_texts
from ragcache_retriever.search.vector_index import Vectors
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import (
    DiskUse,
    Document,
    OutboxClaim,
    OutboxDelete,
    Removal,
    StoredDocument,
)
from ragcache_retriever.store.vector_indexes import VectorIndexes

logger = logging.getLogger(__name__)


class KnowledgeBase:
    """All collections of the service. It refuses calls until ``load`` has returned.

    Args:
        markdown: The content type whose headings and code fences are recognized.
        gate: Lets searches go before ingestion. An embedder in this process has the same one.
        split_limit: CPU time in which a document has to be split.
        clock: Unix time in seconds.
    """

    def __init__(
        self,
        store: DocumentStore,
        indexes: VectorIndexes,
        ranking: Ranking,
        embedder: Embedder,
        tokenizer: ServingTokenizer,
        defaults: CollectionDefaults,
        *,
        markdown: int,
        gate: QueryGate | None = None,
        split_limit: SplitLimit | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.threads = StoreThreads(clock)
        self.tokenizer_identity = tokenizer.identity
        self._embedder = embedder
        self._ranking = ranking
        self._gate = gate or QueryGate()
        self._preparer = DocumentPreparer(embedder, tokenizer, markdown, split_limit)
        self._indexes = GenerationIndexes(store, indexes)
        self._collections = CollectionSet(
            store, self._indexes, self.threads, self._preparer, defaults
        )
        self._ingestion = Ingestion(
            store, self._collections, self._indexes, self.threads, self._preparer, self._gate
        )
        self._searching = Searching(
            store,
            self._collections,
            self._indexes,
            self.threads,
            embedder,
            self._preparer,
            ranking,
            self._gate,
        )
        self._remake = Remake(
            store, self._collections, self._indexes, self.threads, self._ingestion
        )
        self._catch_up = IndexCatchUp(self._collections, self._indexes, self.threads)
        self._refresh = CollectionRefresh(self._collections, self.threads, self._remake)

    async def load(self, progress: Callable[[str], None] = logger.debug) -> None:
        """Start the embedder and open the indexes.

        Documents of an older recipe are prepared again afterwards, in the background.

        Args:
            progress: Receives the state of the load in words.

        Raises:
            Unavailable: The embedder does not answer. The caller may call again.
        """
        progress("loading the embedder")
        await self._embedder.start()
        await self._collections.adopt_embedder()
        progress("loading the index")
        await self.threads.write(self._collections.add_missing)
        self._collections.finish_loading()
        self._remake.start()
        self._catch_up.start()
        if self.store.database.is_shared:
            self._refresh.start()

    async def close(self) -> None:
        """Wait for the running write, then release threads, embedder and files."""
        await self._refresh.stop()
        await self._catch_up.close()
        await self._remake.stop()
        await self._preparer.close()
        await asyncio.to_thread(self._searching.close)
        await self.threads.close()
        await asyncio.to_thread(self._ranking.close)
        self._indexes.close()
        await self._embedder.close()
        self.store.database.close()

    async def wait_until_idle(self) -> None:
        """Wait until no document has to be prepared again and nothing has to be removed."""
        await self._remake.wait_until_idle()

    # Collections

    async def put_collection(
        self, name: str, settings: CollectionSettings, kept: Collection[str] = ()
    ) -> CollectionInfo:
        """Create a collection or change it. Its documents follow in the background.

        Args:
            kept: Fields of the settings that stay as they are in a collection that exists.
        """
        await self._collections.put(name, settings, kept)
        self._remake.start()
        return await self._collections.info(name)

    async def delete_collection(self, name: str) -> CollectionRemoval:
        """Delete a collection with all its documents. Raises NotFound."""
        removal = await self._collections.delete(name)
        self._remake.start()
        return removal

    async def collection(self, name: str) -> CollectionInfo:
        """Return a collection. Raises NotFound."""
        return await self._collections.info(name)

    async def collections(self) -> list[CollectionInfo]:
        """Return all collections, sorted by name."""
        return await self._collections.infos()

    async def indexes(self) -> list[IndexInfo]:
        """Return the state of the indexes that serve."""
        self._collections.check_loaded()
        return await self._collections.index_infos()

    @property
    def num_missed(self) -> int:
        """Vectors that indexes have yet to add or to remove, because they refused a change."""
        return sum(map(self._indexes.num_missed, self._indexes.behind()))

    async def disk(self) -> DiskUse:
        """Return the used and the free disk space."""
        return await self.threads.read(self.store.database.disk)

    # Documents

    async def upsert(self, collection: str, document: Document) -> UpsertResult:
        """Insert or replace a document. It is durable and searchable afterwards.

        If the index does not answer, searches by words find the document at once, and searches by
        vectors as soon as the index has caught up.

        Raises:
            NotFound: There is no such collection.
            InvalidInput: The document takes too long to split, or the embedder refuses it.
            TooLarge: The document exceeds a quota of the collection.
            Unavailable: The embedder does not answer, the document cannot be split now, or the
                disk is full.
        """
        return await self._ingestion.upsert(collection, document)

    async def delete(self, collection: str, document_id: str) -> tuple[OutboxDelete, ...]:
        """Delete a document.

        A repeated delete succeeds while the outbox knows of the first one, and returns what is
        pending of it.

        Returns:
            The deletes that the caller is to send.

        Raises:
            NotFound: There is no such collection or document.
        """
        return await self._ingestion.delete(collection, document_id)

    async def document(self, collection: str, document_id: str) -> StoredDocument:
        """Return a document with its text. Raises NotFound."""
        self._collections.get(collection)
        stored = await self.threads.read(self.store.reads.get, collection, document_id)
        if stored is None:
            raise document_not_found(document_id, collection)
        return stored

    async def documents(
        self, collection: str, after: str, limit: int
    ) -> tuple[list[StoredDocument], str | None]:
        """Return a page of documents (see DocumentReads.page). Raises NotFound."""
        self._collections.get(collection)
        return await self.threads.read(self.store.reads.page, collection, after, limit)

    # Search

    def search(self, query: SearchQuery) -> AsyncIterator[SearchStage]:
        """Yield the stages of a search; the last one is final. Closing the iterator ends it.

        Raises:
            NotFound: There is no such collection.
            Unavailable: The embedder does not answer, or has been replaced by another one.
        """
        return self._searching.search(query)

    async def similar_chunks(
        self, collection: str, document_id: str, top_k: int
    ) -> list[list[SimilarChunk]]:
        """Return the most similar chunks for each chunk of a document, best first.

        Raises:
            NotFound: There is no such collection or document.
        """
        return await self._searching.similar_chunks(collection, document_id, top_k)

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Return the embeddings of texts, shape (len(texts), dimension). Raises Unavailable."""
        self._collections.check_loaded()
        return await self._embedder.embed(texts, urgent=True)

    async def score_texts(self, query: str, texts: Sequence[str]) -> Scores:
        """Return how well each text answers a query, shape (len(texts),). Raises Unavailable."""
        self._collections.check_loaded()
        return await score_texts(self._embedder, self._ranking.reranker, query, texts)

    # Outbox. It also serves while the indexes are loaded.

    async def removals(self, after: int, limit: int) -> tuple[list[Removal], int]:
        """Return the removals after a sequence, oldest first, and the sequence of the last one."""
        return await self.threads.read(self.store.outbox.removals, after, limit)

    async def claim_deletes(self, limit: int) -> OutboxClaim:
        """Return pending deletes that no other caller is sending."""
        return await self.threads.write(self._claim, limit)

    async def acknowledge_deletes(
        self, complete: Sequence[bytes], partial: Sequence[bytes]
    ) -> None:
        """Record which deletes every shard, or at least one, has acknowledged."""
        await self.threads.write(self._acknowledge, complete, partial)

    # Reports

    async def put_report(self, name: str, body: bytes) -> None:
        """Store a report durably in place of the one of its name."""
        self._collections.check_loaded()
        await self.threads.write(self._put_report, name, body)

    async def report(self, name: str) -> tuple[bytes, int]:
        """Return a report and the Unix milliseconds of its last change. Raises NotFound."""
        self._collections.check_loaded()
        found = await self.threads.read(self.store.reads.report, name)
        if found is None:
            raise NotFound("report", name, "put it first")
        return found

    def _claim(self, limit: int) -> OutboxClaim:
        with self.store.database.transaction(frees_space=True):
            claim = self.store.outbox.claim(limit, self.threads.now_ms())
            self.store.database.commit()
        return claim

    def _acknowledge(self, complete: Sequence[bytes], partial: Sequence[bytes]) -> None:
        with self.store.database.transaction(frees_space=True):
            self.store.outbox.acknowledge(complete, partial, self.threads.now_ms())
            self.store.database.commit()

    def _put_report(self, name: str, body: bytes) -> None:
        with self.store.database.transaction():
            self.store.documents.put_report(name, body, self.threads.now_ms())
            self.store.database.commit()
