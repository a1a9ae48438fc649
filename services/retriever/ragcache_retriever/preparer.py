"""Turns a document into chunks with token ids and embeddings, before anything is written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from ragcache_core.cost.text_rate import TextRate
from ragcache_core.errors import TooLarge, Unavailable
from ragcache_retriever.concurrency.query_gate import QueryGate
from ragcache_retriever.documents.chunking import CHUNKER_VERSION, Chunk
from ragcache_retriever.documents.collection import Chunking
from ragcache_retriever.documents.splitter import DocumentSplitter, SplitLimit
from ragcache_retriever.documents.tokenizer import ServingTokenizer
from ragcache_retriever.embedding.embedder import Embedder, Vectors
from ragcache_retriever.store.records import ChunkSet, Document, Recipe
from ragcache_wire.v1 import retriever_pb2 as pb

EMBED_LIMIT_S: Final = 110.0
"""Time to embed a document while a caller waits. With the time to split it, it ends before the
caller's deadline."""
LATER_EMBED_LIMIT_S: Final = 3600.0
"""Time to embed a document for which no caller waits."""
MEASURED_CHARS: Final = 65_536
"""Shorter documents tell little of how long a long one takes, and are always in time."""
EMBEDDED_TEXT_VERSION = 1
"""Increase it when embedded_text changes. Stored chunks are then embedded again."""


def embedded_text(title: str, chunk: Chunk) -> str:
    """Return the text that is embedded for a chunk: title, headings, then the chunk itself."""
    path = chunk.heading_path
    headings = path if path[:1] == (title,) else (title, *path)
    return "\n".join((*headings, chunk.text))


class DocumentPreparer:
    """Splits documents in processes of their own, and embeds wherever the embedder does it.

    Args:
        split_limit: Time in which a document has to be split.
        gate: Lets searches go first. An embedder in this process has the same one.
    """

    def __init__(
        self,
        embedder: Embedder,
        tokenizer: ServingTokenizer,
        split_limit: SplitLimit | None = None,
        gate: QueryGate | None = None,
    ) -> None:
        self.embedder = embedder
        self.tokenizer_identity = tokenizer.identity
        self.gate = gate or QueryGate()
        self._splitter = DocumentSplitter(tokenizer, split_limit)
        self._rates = {
            limit_s: TextRate(limit_s) for limit_s in (EMBED_LIMIT_S, LATER_EMBED_LIMIT_S)
        }

    async def close(self) -> None:
        """End the processes that split documents."""
        await self._splitter.close()

    def adopt_embedder(self, recipes: Iterable[Recipe]) -> None:
        """Let the embedder take the identity of a stored recipe whose vectors are comparable.

        Call it after the embedder has started.
        """
        version = f"{EMBEDDED_TEXT_VERSION}:"
        self.embedder.adopt(
            recipe.embedder.removeprefix(version)
            for recipe in recipes
            if recipe.embedder.startswith(version)
        )

    def recipe(self, chunking: Chunking) -> Recipe:
        """Return the recipe of documents prepared with a chunking. Needs a started embedder."""
        return Recipe(
            splitter=str(CHUNKER_VERSION),
            chunking=chunking,
            tokenizer=self.tokenizer_identity,
            embedder=f"{EMBEDDED_TEXT_VERSION}:{self.embedder.identity}",
            dimension=self.embedder.dimension,
        )

    def can_embed(self, recipe: Recipe) -> bool:
        """Whether the embedder of a recipe is the one that runs."""
        wanted = self.recipe(recipe.chunking)
        return (recipe.embedder, recipe.dimension) == (wanted.embedder, wanted.dimension)

    async def prepare(
        self,
        document: Document,
        recipe: Recipe,
        known: Mapping[str, Vectors],
        embed_limit_s: float | None = None,
    ) -> ChunkSet:
        """Split and embed a document.

        It is split by the chunking of the recipe, and always tokenized by the serving model of now.
        If the embedder of the recipe is another one, the chunks have no embeddings.

        Args:
            known: Embeddings by embedded text, each of shape (dimension,), which are not computed
                again.
            embed_limit_s: EMBED_LIMIT_S or LATER_EMBED_LIMIT_S. None: not limited.

        Raises:
            TooLarge: The document takes longer to embed than the limit.
            Unavailable: The embedder does not answer, or the document cannot be split now.
            InvalidInput: The document takes too long to split, or the embedder refuses a text.
        """
        split = await self._splitter.split(
            document.id,
            document.text,
            title=document.title,
            markdown=document.content_type == pb.CONTENT_TYPE_MARKDOWN,
            chunking=recipe.chunking,
        )
        embeddings = None
        if self.can_embed(recipe):
            texts = [embedded_text(document.title, chunk) for chunk in split.chunks]
            try:
                embeddings = await self._embed(texts, known, embed_limit_s)
            except TooLarge as error:
                raise _too_long(document.id, len(texts), embed_limit_s) from error
        return ChunkSet(
            self.tokenizer_identity, split.chunks, split.digests, split.token_ids, embeddings
        )

    async def _embed(
        self, texts: list[str], known: Mapping[str, Vectors], limit_s: float | None
    ) -> Vectors:
        embeddings = np.empty((len(texts), self.embedder.dimension), np.float32)
        missing = []
        for i, text in enumerate(texts):
            if text in known:
                embeddings[i] = known[text]
            else:
                missing.append(i)
        if missing:
            missing_texts = [texts[i] for i in missing]
            embedded = await self._embed_in_time(missing_texts, limit_s)
            if embedded.shape != (len(missing), self.embedder.dimension):
                raise Unavailable("embedder", f"it returned vectors of shape {embedded.shape}")
            embeddings[missing] = embedded
        return embeddings

    async def _embed_in_time(self, texts: Sequence[str], limit_s: float | None) -> Vectors:
        """Embed texts. Raises TooLarge if they take longer than a limit."""
        is_long = sum(map(len, texts)) >= MEASURED_CHARS
        rate = self._rates[limit_s] if is_long and limit_s is not None else None
        if rate is not None:
            rate.check(texts)
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                vectors = await self.embedder.embed(texts, urgent=False)
        except TimeoutError:
            if rate is not None:
                rate.observe_end(texts)
            raise Unavailable("embedder", f"it did not answer within {limit_s:g} s") from None
        if is_long:
            for one in self._rates.values():
                one.observe(texts, time.monotonic() - began_s)
        return vectors


def _too_long(document_id: str, num_chunks: int, limit_s: float | None) -> TooLarge:
    fix = "divide the document into shorter ones"
    if limit_s == EMBED_LIMIT_S:
        fix = f"send it with `Prefer: respond-async`, or {fix}"
    return TooLarge(
        "document.text",
        f"of document {document_id!r} has {num_chunks} chunks, which take longer than"
        f" {limit_s:g} s to embed",
        fix,
    )
