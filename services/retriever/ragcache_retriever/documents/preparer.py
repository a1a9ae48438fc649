"""Turns a document into chunks with embeddings, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ragcache_retriever.concurrency.threads import finish, run
from ragcache_retriever.documents.chunking import CHUNKER_VERSION, Chunk, cut
from ragcache_retriever.documents.collection import Chunking
from ragcache_retriever.documents.document_store import Document, Recipe
from ragcache_retriever.documents.tokenizer import TokenCounter
from ragcache_retriever.embedding.embedder import (
    EMBEDDED_TEXT_VERSION,
    Embedder,
    Vectors,
    embedded_text,
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A document cut and embedded. embeddings: shape (len(chunks), dimension)."""

    document: Document
    recipe: Recipe
    chunks: list[Chunk]
    embeddings: Vectors


class Preparer:
    """Cuts in a thread of its own, embeds wherever the embedder does it.

    markdown: the content type whose headings and code fences are seen.
    """

    def __init__(self, embedder: Embedder, count_tokens: TokenCounter, markdown: int) -> None:
        self._embedder = embedder
        self._count_tokens = count_tokens
        self._markdown = markdown
        # One document at a time: cutting is Python, and two threads would only take turns.
        self._cutter = ThreadPoolExecutor(1, "cutter")

    async def close(self) -> None:
        """Finish the cut that is running."""
        await finish(self._cutter)

    def recipe(self, chunking: Chunking) -> Recipe:
        """What a document prepared with chunking is made by. The embedder must have started."""
        return Recipe(
            chunker=f"{CHUNKER_VERSION}:{chunking.size_tokens}:{chunking.overlap_tokens}"
            f":{self._count_tokens.identity}",
            embedder=f"{EMBEDDED_TEXT_VERSION}:{self._embedder.identity}"
            f":{self._embedder.dimension}",
        )

    async def prepare(
        self, document: Document, chunking: Chunking, held: Mapping[str, Vectors]
    ) -> Prepared:
        """Cut and embed a document.

        held: embeddings by embedded text that are at hand already, each of shape (dimension,).
        Raises Unavailable when the embedder does not answer, InvalidInput when it refuses a text.
        """
        chunks = await run(self._cutter, self._cut, document, chunking)
        texts = [embedded_text(document.title, chunk) for chunk in chunks]
        embeddings = np.empty((len(chunks), self._embedder.dimension), np.float32)
        missing = []
        for i, text in enumerate(texts):
            if text in held:
                embeddings[i] = held[text]
            else:
                missing.append(i)
        size = self._embedder.batch_size
        for batch in (missing[i : i + size] for i in range(0, len(missing), size)):
            embeddings[batch] = await self._embedder.embed([texts[i] for i in batch], urgent=False)
        return Prepared(document, self.recipe(chunking), chunks, embeddings)

    def _cut(self, document: Document, chunking: Chunking) -> list[Chunk]:
        return cut(
            document.text,
            markdown=document.content_type == self._markdown,
            chunking=chunking,
            count_tokens=self._count_tokens,
        )
