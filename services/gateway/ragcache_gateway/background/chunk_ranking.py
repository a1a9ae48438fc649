"""Ranks chunks before questions retrieve them, by how central they are among all chunks."""

from __future__ import annotations

import asyncio
import logging
import math

from ragcache_core.background.precompute_queue import PrecomputeQueue
from ragcache_core.errors import NotFound, RagCacheError
from ragcache_core.plan.reuse_plan import document_name
from ragcache_wire.clients.retriever_client import RetrieverClient

log = logging.getLogger(__name__)

NEIGHBOURS = 8
"""Nearest neighbours whose mean similarity is a chunk's centrality."""

SETTLE_S = 0.5
"""Wait for more documents before the first one is ranked: a chunk's neighbours come with them."""

RETRY_S = 5.0


class ChunkRanking:
    """Asks the retriever for the neighbours of queued chunks. For one event loop."""

    def __init__(self, queue: PrecomputeQueue, retriever: RetrieverClient) -> None:
        self._queue = queue
        self._retriever = retriever
        self._locations: dict[str, tuple[str, str]] = {}
        self._has_work = asyncio.Event()

    def add(self, collection: str, document_id: str) -> None:
        """Rank the queued chunks of a document that was written."""
        self._locations[document_name(collection, document_id)] = (collection, document_id)
        self._has_work.set()

    def remove(self, document: str) -> None:
        """Forget a document that was deleted, by its name."""
        self._locations.pop(document, None)

    async def run(self) -> None:
        """Rank documents until cancelled."""
        while True:
            await self._has_work.wait()
            await asyncio.sleep(SETTLE_S)
            self._has_work.clear()
            for document in self._queue.unranked_documents():
                location = self._locations.pop(document, None)
                if location is not None and not await self._rank(document, *location):
                    self._locations.setdefault(document, location)
                    self._has_work.set()
                    await asyncio.sleep(RETRY_S)
                    break
            else:
                # What is left was computed, dropped or deleted before its turn.
                if not self._has_work.is_set():
                    self._locations.clear()

    async def _rank(self, document: str, collection: str, document_id: str) -> bool:
        """Rank the chunks of a document; return whether it need not be tried again."""
        try:
            found = await self._retriever.similar_chunks(collection, document_id, NEIGHBOURS)
        except NotFound:
            return True
        except RagCacheError as error:
            log.info("chunk ranking: postponed document=%s error=%s", document, error)
            return False
        centralities = [math.fsum(one.score for one in similar) / NEIGHBOURS for similar in found]
        self._queue.rank_document(document, centralities)
        return True
