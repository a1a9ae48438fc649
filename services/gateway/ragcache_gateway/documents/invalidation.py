"""Invalidates stored KV of chunks that no document has any more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor

from ragcache_core.identity.keys import ChunkKey, KVSpace, chunk_key
from ragcache_gateway.documents.deletions import DeletionDelivery
from ragcache_gateway.documents.events import DocumentChanged
from ragcache_gateway.prompts.builder import PromptBuilder

BATCH_CHUNKS = 64
"""Chunks of one delete."""


class VariantInvalidation:
    """Deletes the variants of removed chunks and of deleted documents from the cache store."""

    def __init__(self, deletions: DeletionDelivery) -> None:
        self._deletions = deletions

    async def invalidate(self, change: DocumentChanged) -> int | None:
        """Delete what the change makes useless.

        A deleted document also loses what is stored in its name, such as chunks that it was split
        into with earlier settings.

        Returns:
            How many variants were deleted; None if no shard has acknowledged all deletes yet. The
            gateway then sends them again in the background.
        """
        removed: int | None = 0
        chunks = list(change.removed_chunks)
        documents = [change.document_name] if change.is_deletion else []
        while chunks or documents:
            batch, chunks = chunks[:BATCH_CHUNKS], chunks[BATCH_CHUNKS:]
            deleted = await self._deletions.delete(
                chunks=batch, documents=documents, domain=change.domain if documents else ""
            )
            removed = None if removed is None or deleted is None else removed + deleted
            documents = []
        return removed


class RemovedChunkKeys:
    """Computes the keys of removed chunks from their texts.

    Args:
        tokenizing: Runs the prompt builder, which one thread may use at a time.
    """

    def __init__(
        self, prompts: PromptBuilder, tokenizing: Executor, space: KVSpace, domain: str
    ) -> None:
        self._prompts = prompts
        self._tokenizing = tokenizing
        self._space = space
        self._domain = domain

    async def compute(self, chunk_texts: Sequence[str]) -> tuple[ChunkKey, ...]:
        """Tokenize chunks and compute their keys.

        Questions get their turn at the tokenizer between two batches of a large document.
        """
        loop = asyncio.get_running_loop()
        keys: list[ChunkKey] = []
        for start in range(0, len(chunk_texts), BATCH_CHUNKS):
            batch = chunk_texts[start : start + BATCH_CHUNKS]
            keys += await loop.run_in_executor(self._tokenizing, self._keys, batch)
        return tuple(keys)

    def _keys(self, texts: Sequence[str]) -> list[ChunkKey]:
        return [
            chunk_key(self._space, self._domain, self._prompts.encode_chunk(text)) for text in texts
        ]
