"""Stored KV of chunks that no document has any more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor

from ragcache_core.identity.keys import ChunkKey, KVSpace, chunk_key
from ragcache_core.plan.reuse_plan import document_name
from ragcache_gateway.prompts.builder import PromptBuilder
from ragcache_gateway.documents.deletions import Deletions

BATCH = 64
"""Chunks per call: between two batches of a large document, questions get their turn at the
tokenizer."""


class StoredVariants:
    """Tells the cache store which chunks and documents are gone."""

    def __init__(
        self,
        *,
        deletions: Deletions,
        prompts: PromptBuilder,
        tokenizing: Executor,
        space: KVSpace,
        domain: str,
    ) -> None:
        self._deletions = deletions
        self._prompts = prompts
        self._tokenizing = tokenizing
        self._space = space
        self._domain = domain

    async def drop(self, chunk_texts: Sequence[str]) -> int | None:
        """Drop every variant of the chunks; returns how many there were.

        None if no shard has acknowledged all of it yet: it is tried again in the background.
        """
        return await self._drop(chunk_texts, ())

    async def drop_document(
        self, collection: str, document: str, chunk_texts: Sequence[str]
    ) -> int | None:
        """Drop a document that is gone: its chunks, as ``drop`` does, and all that was stored in
        its name, such as chunks that it was cut into before."""
        return await self._drop(chunk_texts, [document_name(collection, document)])

    async def _drop(self, chunk_texts: Sequence[str], documents: Sequence[str]) -> int | None:
        loop = asyncio.get_running_loop()
        removed: int | None = 0
        left, documents_left = list(chunk_texts), list(documents)
        while left or documents_left:
            texts, left = left[:BATCH], left[BATCH:]
            keys = await loop.run_in_executor(self._tokenizing, self._keys, texts)
            dropped = await self._deletions.delete(
                chunks=keys,
                documents=documents_left,
                domain=self._domain if documents_left else "",
            )
            removed = None if removed is None or dropped is None else removed + dropped
            documents_left = []
        return removed

    def _keys(self, texts: Sequence[str]) -> list[ChunkKey]:
        return [
            chunk_key(self._space, self._domain, self._prompts.encode_chunk(text)) for text in texts
        ]
