"""Turns a document into chunks with token ids and embeddings, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ragcache_retriever.documents.chunking import CHUNKER_VERSION, Chunk
from ragcache_retriever.documents.collection import Chunking
from ragcache_retriever.documents.document_store import Document, Recipe
from ragcache_retriever.documents.splitter import DocumentSplitter, SplitLimit
from ragcache_retriever.documents.tokenizer import ServingTokenizer
from ragcache_retriever.embedding.embedder import Embedder, Vectors

EMBEDDED_TEXT_VERSION = 1
"""Increase it when embedded_text changes. Stored chunks are then embedded again."""


@dataclass(frozen=True, slots=True)
class PreparedDocument:
    """A document with its chunks.

    Attributes:
        token_ids: Of each chunk, see ``SplitDocument``.
        digests: Of the token ids of each chunk.
        embeddings: Shape (len(chunks), dimension).
    """

    document: Document
    recipe: Recipe
    chunks: list[Chunk]
    token_ids: list[bytes]
    digests: list[bytes]
    embeddings: Vectors


def embedded_text(title: str, chunk: Chunk) -> str:
    """Return the text that is embedded for a chunk: title, headings, then the chunk itself."""
    path = chunk.heading_path
    headings = path if path[:1] == (title,) else (title, *path)
    return "\n".join((*headings, chunk.text))


class DocumentPreparer:
    """Splits documents in processes of their own, and embeds wherever the embedder does it.

    Args:
        markdown: The content type whose headings and code fences are recognized.
        split_limit: Time in which a document has to be split.
    """

    def __init__(
        self,
        embedder: Embedder,
        tokenizer: ServingTokenizer,
        markdown: int,
        split_limit: SplitLimit | None = None,
    ) -> None:
        self._embedder = embedder
        self._tokenizer_identity = tokenizer.identity
        self._markdown = markdown
        self._splitter = DocumentSplitter(tokenizer, split_limit)

    async def close(self) -> None:
        """End the processes that split documents."""
        await self._splitter.close()

    def recipe(self, chunking: Chunking) -> Recipe:
        """Return the recipe of documents prepared with a chunking. Needs a started embedder."""
        return Recipe(
            chunker=f"{CHUNKER_VERSION}:{chunking.size_tokens}:{chunking.overlap_tokens}"
            f":{self._tokenizer_identity}",
            embedder=f"{EMBEDDED_TEXT_VERSION}:{self._embedder.identity}"
            f":{self._embedder.dimension}",
        )

    async def prepare(
        self, document: Document, chunking: Chunking, known: Mapping[str, Vectors]
    ) -> PreparedDocument:
        """Split and embed a document.

        Args:
            known: Embeddings by embedded text, each of shape (dimension,), which are not computed
                again.

        Raises:
            Unavailable: The embedder does not answer, or the document cannot be split now.
            InvalidInput: The document takes too long to split, or the embedder refuses a text.
        """
        split = await self._splitter.split(
            document.id,
            document.text,
            markdown=document.content_type == self._markdown,
            chunking=chunking,
        )
        chunks = split.chunks
        texts = [embedded_text(document.title, chunk) for chunk in chunks]
        embeddings = np.empty((len(chunks), self._embedder.dimension), np.float32)
        missing = []
        for i, text in enumerate(texts):
            if text in known:
                embeddings[i] = known[text]
            else:
                missing.append(i)
        if missing:
            missing_texts = [texts[i] for i in missing]
            embeddings[missing] = await self._embedder.embed(missing_texts, urgent=False)
        return PreparedDocument(
            document, self.recipe(chunking), chunks, split.token_ids, split.digests, embeddings
        )
