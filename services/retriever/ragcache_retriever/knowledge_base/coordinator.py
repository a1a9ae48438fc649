"""The knowledge base: its parts, and how they start and end together.

One writer thread changes documents and indexes. A few reader threads search and read. Processes of
their own split documents, and the embedder embeds wherever it runs. The event loop only waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence

from ragcache_core.errors import NotFound
from ragcache_core.retrieval.fusion import Scores
from ragcache_retriever.concurrency.threads import StoreThreads
from ragcache_retriever.documents.collection import CollectionDefaults, CollectionSettings
from ragcache_retriever.knowledge_base.catch_up import ChangeFollower
from ragcache_retriever.knowledge_base.collections import CollectionRemoval, CollectionSet
from ragcache_retriever.knowledge_base.indexes import GenerationIndexes
from ragcache_retriever.knowledge_base.ingestion import Ingestion
from ragcache_retriever.knowledge_base.later_writes import LaterWrites
from ragcache_retriever.knowledge_base.remake import Remake
from ragcache_retriever.knowledge_base.searching import Searching
from ragcache_retriever.preparer import DocumentPreparer
from ragcache_retriever.ranking.hybrid import HybridRanking
from ragcache_retriever.ranking.rerankers import score_texts
from ragcache_retriever.search.vector_index import VectorIndexes, Vectors
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import DiskUse, OutboxClaim
from ragcache_retriever.store.usage import CountedUse, UsageSender, UsageTotals, UsageWanted
from ragcache_wire.v1 import retriever_pb2 as pb

logger = logging.getLogger(__name__)


class KnowledgeBase:
    """All collections of the service. It refuses most calls until ``load`` has returned.

    Args:
        clock: Unix time in seconds.
    """

    def __init__(
        self,
        store: DocumentStore,
        indexes: VectorIndexes,
        ranking: HybridRanking,
        preparer: DocumentPreparer,
        defaults: CollectionDefaults,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.threads = StoreThreads(clock)
        self.preparer = preparer
        self._ranking = ranking
        self._indexes = GenerationIndexes(store, indexes)
        self.collections = CollectionSet(store, self._indexes, self.threads, preparer, defaults)
        self.ingestion = Ingestion(self.collections)
        self.searching = Searching(self.collections, ranking)
        self.later_writes = LaterWrites(self.collections, self.ingestion)
        self._remake = Remake(self.collections, self.ingestion)
        self._follower = ChangeFollower(self.collections, self._remake)

    async def load(self, progress: Callable[[str], None] = logger.debug) -> None:
        """Start the embedder and open the indexes.

        Documents of an older recipe are prepared again afterwards, in the background.

        Args:
            progress: Receives the state of the load in words.

        Raises:
            Unavailable: The embedder does not answer. The caller may call again.
        """
        progress("loading the embedder")
        await self.preparer.embedder.start()
        await self.collections.adopt_embedder()
        progress("loading the index")
        await self.threads.write(self.collections.add_missing)
        self.collections.is_loaded = True
        self._remake.start()
        await self.later_writes.start()
        self._follower.start()

    async def close(self) -> None:
        """Wait for the running write, then release threads, embedder and files."""
        await self._follower.close()
        await self.later_writes.stop()
        await self._remake.stop()
        await self.preparer.close()
        await asyncio.to_thread(self.searching.close)
        await self.threads.close()
        await asyncio.to_thread(self._ranking.close)
        self._indexes.close()
        await self.preparer.embedder.close()
        self.store.database.close()

    async def wait_until_idle(self) -> None:
        """Wait until no document has to be prepared again and nothing has to be removed."""
        await self._remake.wait_until_idle()

    async def put_collection(
        self, name: str, settings: CollectionSettings, kept: Collection[str] = ()
    ) -> pb.Collection:
        """Create a collection or change it. Its documents follow in the background.

        Args:
            kept: Fields of the settings that stay as they are in a collection that exists.
        """
        await self.collections.put(name, settings, kept)
        self._remake.start()
        return await self.collections.info(name)

    async def delete_collection(self, name: str) -> CollectionRemoval:
        """Delete a collection with all its documents. Raises NotFound."""
        removal = await self.collections.delete(name)
        self._remake.start()
        return removal

    @property
    def num_missed(self) -> int:
        """Vectors that indexes have yet to add or to remove, because they refused a change."""
        return sum(map(self._indexes.num_missed, self._indexes.behind()))

    async def disk(self) -> DiskUse:
        """Return the used and the free disk space."""
        return await self.threads.read(self.store.database.disk)

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Return the embeddings of texts, shape (len(texts), dimension). Raises Unavailable."""
        self.collections.check_loaded()
        return await self.preparer.embedder.embed(texts, urgent=True)

    async def score_texts(self, query: str, texts: Sequence[str]) -> Scores:
        """Return how well each text answers a query, shape (len(texts),). Raises Unavailable."""
        self.collections.check_loaded()
        return await score_texts(self.preparer.embedder, self._ranking.reranker, query, texts)

    # Outbox. It also serves while the indexes are loaded.

    async def claim_deletes(self, limit: int) -> OutboxClaim:
        """Return pending deletes that no other caller is sending."""

        def claim() -> OutboxClaim:
            with self.store.database.transaction(frees_space=True):
                claim = self.store.outbox.claim(limit, self.threads.now_ms())
                self.store.database.commit()
            return claim

        return await self.threads.write(claim)

    async def acknowledge_deletes(
        self, complete: Sequence[bytes], partial: Sequence[bytes]
    ) -> None:
        """Record which deletes every shard, or at least one, has acknowledged."""

        def acknowledge() -> None:
            with self.store.database.transaction(frees_space=True):
                self.store.outbox.acknowledge(complete, partial, self.threads.now_ms())
                self.store.database.commit()

        await self.threads.write(acknowledge)

    # Usage. It also serves while the indexes are loaded.

    async def add_usage(self, sender: UsageSender, counted: Sequence[CountedUse]) -> None:
        """Add what a gateway has counted, unless it was added before."""

        def add() -> None:
            with self.store.database.transaction():
                self.store.usage.add(sender, counted, self.threads.now_ms())
                self.store.database.commit()

        await self.threads.write(add)

    async def usage_totals(
        self, gateway: bytes, keys: Sequence[str], tenants: Sequence[str], unix_s: int
    ) -> UsageTotals:
        """Return what keys and tenants have used in the windows of a time.

        Args:
            gateway: Gets what the others say of their waiting requests.
        """

        def read() -> UsageTotals:
            table = self.store.usage
            return UsageTotals(
                table.totals("key", keys, unix_s),
                table.totals("tenant", tenants, unix_s),
                table.waiting(gateway, self.threads.now_ms()),
            )

        return await self.threads.read(read)

    async def usage(self, wanted: UsageWanted, limit: int) -> list[CountedUse]:
        """Return the first rows of a listing of usage."""
        return await self.threads.read(self.store.usage.page, wanted, limit)

    # Reports

    async def put_report(self, name: str, body: bytes) -> None:
        """Store a report durably in place of the one of its name."""
        self.collections.check_loaded()

        def put() -> None:
            with self.store.database.transaction():
                self.store.documents.put_report(name, body, self.threads.now_ms())
                self.store.database.commit()

        await self.threads.write(put)

    async def report(self, name: str) -> tuple[bytes, int]:
        """Return a report and the Unix milliseconds of its last change. Raises NotFound."""
        self.collections.check_loaded()
        found = await self.threads.read(self.store.reads.report, name)
        if found is None:
            raise NotFound("report", name, "put it first")
        return found
