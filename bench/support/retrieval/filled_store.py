"""Fills a collection of a stopped retriever with generated chunks and embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.support.retrieval.generated_documents import ChunkTexts
from ragcache_core.identity.keys import token_digest
from ragcache_kv.model.tokenizer import pack_ids
from ragcache_retriever.documents.chunking import Chunk
from ragcache_retriever.store.records import (
    ChunkSet,
    Document,
    DocumentVersion,
    Vectors,
)
from ragcache_retriever.store.sqlite.document_store import open_sqlite
from ragcache_wire.v1 import retriever_pb2 as pb

CHUNKS_PER_DOCUMENT = 100
_CHUNKS_PER_CENTRE = 200
_SPREAD = 0.8
"""Length of a chunk's difference from its centre, whose length is 1."""
_TOKENS_PER_CHUNK = 180


def fill(data_dir: Path, collection: str, num_chunks: int, seed: int = 0) -> None:
    """Write generated chunks to a collection, with embeddings that form clusters.

    Args:
        data_dir: Data of a retriever that does not run. It has the collection with a generation.
    """
    store = open_sqlite(data_dir)
    try:
        stored = store.collections.one(collection)
        assert stored is not None
        assert stored.serving is not None
        generation = stored.serving.row
        recipe = stored.serving.recipe
        for document, chunks in _documents(recipe.tokenizer, recipe.dimension, num_chunks, seed):
            with store.database.transaction():
                store.documents.replace(
                    collection,
                    document,
                    DocumentVersion(document.content_hash(), 1),
                    {generation: chunks},
                    now_ms=1,
                    claim=False,
                )
                store.database.commit()
    finally:
        store.database.close()


def _documents(
    tokenizer: str, dimension: int, num_chunks: int, seed: int
) -> Iterator[tuple[Document, ChunkSet]]:
    draw = np.random.default_rng(seed)
    texts = ChunkTexts(seed)
    num_centres = max(1, num_chunks // _CHUNKS_PER_CENTRE)
    centres = _unit(draw.standard_normal((num_centres, dimension), np.float32))
    for first in range(0, num_chunks, CHUNKS_PER_DOCUMENT):
        count = min(CHUNKS_PER_DOCUMENT, num_chunks - first)
        chunks = [Chunk(text, ()) for text in texts.texts(count)]
        ids = draw.integers(0, 1 << 15, (count, _TOKENS_PER_CHUNK), np.uint32)
        noise = _unit(draw.standard_normal((count, dimension), np.float32))
        vectors = _unit(centres[draw.integers(num_centres, size=count)] + _SPREAD * noise)
        text = "\n\n".join(chunk.text for chunk in chunks)
        name = f"generated-{first // CHUNKS_PER_DOCUMENT}"
        yield (
            Document(name, name, text, pb.CONTENT_TYPE_TEXT, {}),
            ChunkSet(
                tokenizer,
                chunks,
                [token_digest(row) for row in ids],
                [pack_ids(row) for row in ids],
                vectors,
            ),
        )


def _unit(vectors: Vectors) -> Vectors:
    normal: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return normal
