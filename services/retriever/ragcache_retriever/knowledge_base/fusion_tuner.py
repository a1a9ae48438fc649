"""Chooses the weights of the legs of each collection in the background.

They are chosen when a collection has chunks, and again when it has twice as many or other ones.
"""

from __future__ import annotations

import asyncio
import logging

from ragcache_core.retrieval.fusion import FusionWeights, weights_from_text, weights_to_text
from ragcache_core.retrieval.fusion_tuning import MIN_QUESTIONS
from ragcache_retriever.concurrency.background import BackgroundTask, attempted
from ragcache_retriever.embedding.embedder import Embedder
from ragcache_retriever.knowledge_base.collections import CollectionSet
from ragcache_retriever.knowledge_base.store_threads import StoreThreads
from ragcache_retriever.preparer import DocumentPreparer, embedded_text
from ragcache_retriever.ranking.rerankers.reranker import Reranker
from ragcache_retriever.ranking.tuning import TuningSample
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import Generation, StoredCollection

log = logging.getLogger(__name__)

INTERVAL_S = 60.0
GROWTH = 2
"""Weights are chosen again for a collection of this many times the chunks."""


class FusionTuner:
    """The background task of one knowledge base that writes.

    Args:
        ranker: A reranker that is used only where it gains, or None.
    """

    def __init__(
        self,
        store: DocumentStore,
        collections: CollectionSet,
        threads: StoreThreads,
        embedder: Embedder,
        preparer: DocumentPreparer,
        ranker: Reranker | None,
    ) -> None:
        self._store = store
        self._collections = collections
        self._threads = threads
        self._embedder = embedder
        self._preparer = preparer
        self._ranker = ranker
        self._task = BackgroundTask("fusion tuner", self._run)

    def start(self) -> None:
        """Begin, unless it runs."""
        self._task.start()

    async def stop(self) -> None:
        """End after the step that is running."""
        await self._task.stop()

    async def tune(self) -> None:
        """Choose weights for all collections that need them."""
        for stored in (await self._threads.read(self._store.collections)).values():
            generation = stored.serving
            if generation is not None and self._is_due(stored, generation):
                await self._choose(stored.name, generation)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await attempted(log, "fusion: weights not chosen", self.tune())

    def _is_due(self, stored: StoredCollection, generation: Generation) -> bool:
        if stored.is_deleting or not self._preparer.can_embed(generation.recipe):
            return False
        if generation.num_chunks < MIN_QUESTIONS:
            return False
        weights = weights_from_text(stored.fusion)
        return (
            weights.generation != generation.row
            or generation.num_chunks >= GROWTH * weights.num_chunks
            or (self._ranker is not None and weights.uses_ranker is None)
        )

    async def _choose(self, name: str, generation: Generation) -> None:
        sample = await self._threads.read(TuningSample, self._store, generation.row, embedded_text)
        texts = sample.texts if len(sample.questions) >= MIN_QUESTIONS else []
        vectors = await self._embedder.embed(texts, urgent=False)
        if texts:
            weights = await self._threads.read(sample.choose, vectors, self._ranker)
        else:
            weights = sample.without_choice()
        await self._threads.write(self._put, name, weights)
        log.info(
            "fusion: weights chosen collection=%s questions=%d lexical=%.2f ranker=%s",
            name,
            weights.num_questions,
            weights.lexical,
            weights.uses_ranker,
        )

    def _put(self, name: str, weights: FusionWeights) -> None:
        stored = self._store.collection(name)
        if stored is None or stored.is_deleting:
            return
        with self._store.transaction():
            self._store.put_fusion(name, weights_to_text(weights))
            self._store.commit()
        self._collections.reload()
