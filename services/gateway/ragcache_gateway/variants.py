"""Stored KV of chunks that no document has any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Executor

from ragcache_core.errors import RagCacheError
from ragcache_core.keys import ChunkKey, KVSpace, chunk_key
from ragcache_gateway.metrics import Metrics
from ragcache_gateway.prompt import PromptBuilder
from ragcache_wire.cachestore_client import PART
from ragcache_wire.sharded_store import AsyncShardedStore

log = logging.getLogger(__name__)

BATCH = 64
"""Chunks per call: between two batches of a large document, questions get their turn at the
tokenizer."""


class StoredVariants:
    """Tells the cache store which chunks are gone."""

    def __init__(
        self,
        *,
        store: AsyncShardedStore,
        prompts: PromptBuilder,
        tokenizing: Executor,
        space: KVSpace,
        domain: str,
        metrics: Metrics,
    ) -> None:
        self._store = store
        self._prompts = prompts
        self._tokenizing = tokenizing
        self._space = space
        self._domain = domain
        self._metrics = metrics

    async def drop(self, chunk_texts: Sequence[str]) -> int | None:
        """Drop every variant of the chunks; returns how many there were.

        None if a shard does not answer: their text is gone from the retriever, so no prompt names
        them again, and the store evicts what nobody asks for.
        """
        loop = asyncio.get_running_loop()
        removed: int | None = 0
        for start in range(0, len(chunk_texts), BATCH):
            texts = chunk_texts[start : start + BATCH]
            keys = await loop.run_in_executor(self._tokenizing, self._keys, texts)
            try:
                dropped = await self._store.delete_chunks(keys)
            except RagCacheError as error:
                # What shards there are have dropped theirs, and the next batch may go better.
                self._metrics.upstream_failures.labels(PART).inc()
                log.warning("variants of %d removed chunks may stay stored: %s", len(keys), error)
                removed = None
            else:
                removed = None if removed is None else removed + dropped
        return removed

    def _keys(self, texts: Sequence[str]) -> list[ChunkKey]:
        return [
            chunk_key(self._space, self._domain, self._prompts.encode_chunk(text)) for text in texts
        ]
