"""A test collection in a real document store, searched by the retriever's own ranking."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.support.retrieval.public_collections import TestCollection
from ragcache_core.identity.keys import KEY_BYTES
from ragcache_core.retrieval.fusion import DEFAULT_LEXICAL_WEIGHT
from ragcache_retriever.concurrency.cpu import usable_cores
from ragcache_retriever.concurrency.query_gate import QueryGate
from ragcache_retriever.documents.chunking import Chunk
from ragcache_retriever.documents.collection import Chunking, CollectionSettings
from ragcache_retriever.embedding.computation import Computation
from ragcache_retriever.embedding.embedder import Precision
from ragcache_retriever.embedding.local_model import MiniLM
from ragcache_retriever.ranking.hybrid import HybridRanking
from ragcache_retriever.ranking.search import Hit, Search, SearchedChunks, SearchMode
from ragcache_retriever.search.vector_index import IndexStage, Rows, Vectors
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import ChunkSet, Document, DocumentVersion, Recipe
from ragcache_retriever.store.sqlite.document_store import open_sqlite
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve

DEPTH = 10
_DOCUMENTS_AT_ONCE = 500
_COLLECTION = "test"


class ExactIndex:
    """Compares a question with all vectors, in one stage. See VectorIndex."""

    def __init__(self, rows: Rows, vectors: Vectors) -> None:
        self._rows, self._vectors = rows, vectors

    def __len__(self) -> int:
        return len(self._rows)

    def search(
        self,
        query: Vectors,
        top_k: int,
        *,
        allowed: Rows | None = None,
        recall: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[IndexStage]:
        """Yield the only stage. Nothing is filtered."""
        scores = self._vectors @ query
        best = np.argsort(-scores, kind="stable")[:top_k]
        rows = tuple(self._rows[best].tolist())
        yield IndexStage(rows, tuple(scores[best].tolist()), 1.0, True, 1.0, len(self))

    def apply(self, removed: Sequence[int], added: Sequence[int], vectors: Vectors) -> None:
        """Refuse: the documents of a benchmark do not change."""
        raise TypeError("the index of a test collection is read-only")

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredTestCollection:
    """A test collection in a store.

    Attributes:
        ids: Document by row.
        query_vectors: By query, of those that have judgments.
    """

    collection: TestCollection
    store: DocumentStore
    generation: int
    index: ExactIndex
    ids: Mapping[int, str]
    query_vectors: Mapping[str, Vectors]

    def search(self, ranking: HybridRanking, query: str, mode: SearchMode) -> tuple[Hit, ...]:
        """Return the final hits of a query."""
        search = Search(
            _COLLECTION,
            self.collection.queries[query],
            DEPTH,
            mode,
            vector=self.query_vectors[query],
        )
        chunks = SearchedChunks(self.store, self.generation, self.index, DEFAULT_LEXICAL_WEIGHT)
        *_, final = ranking.stages(search, chunks)
        return final.hits


def stored(
    collection: TestCollection, folder: Path, vectors: Vectors, query_vectors: Vectors
) -> StoredTestCollection:
    """Return a collection that is written to a folder. Each document is one chunk.

    Args:
        vectors: Of the documents, shape (documents, dimension), of length 1.
        query_vectors: Of the queries that have judgments, in their order.
    """
    store = open_sqlite(folder, DiskReserve(folder, 0))
    recipe = Recipe("none", Chunking(4096, 0), "none", "minilm", vectors.shape[1])
    with store.database.transaction():
        store.collections.put(_COLLECTION, CollectionSettings())
        generation = store.collections.add_generation(_COLLECTION, recipe)
        store.database.commit()
    rows: list[int] = []
    documents = list(collection.documents.items())
    for start in range(0, len(documents), _DOCUMENTS_AT_ONCE):
        with store.database.transaction():
            for i, (name, text) in enumerate(documents[start : start + _DOCUMENTS_AT_ONCE], start):
                rows += _add(store, generation, name, text, vectors[i])
            store.database.commit()
    return StoredTestCollection(
        collection,
        store,
        generation,
        ExactIndex(np.array(rows, np.int64), vectors),
        dict(zip(rows, collection.documents, strict=True)),
        dict(zip(collection.grades, query_vectors, strict=True)),
    )


def _add(
    store: DocumentStore, generation: int, name: str, text: str, vector: Vectors
) -> Sequence[int]:
    title, _, body = text.partition("\n")
    document = Document(name, title or name, body, 1, {})
    chunks = ChunkSet(
        "none",
        [Chunk(body, ())],
        [name.encode().ljust(KEY_BYTES, b".")],
        [b""],
        vector[np.newaxis],
    )
    change = store.documents.replace(
        _COLLECTION,
        document,
        DocumentVersion(document.content_hash(), 1),
        {generation: chunks},
        now_ms=1,
        claim=False,
    )
    return change.indexes[0].added


def embedded_collection(
    collection: TestCollection, kept: Path | None, name: str
) -> tuple[Vectors, Vectors]:
    """Return the embeddings of a collection's documents and of its graded queries.

    Args:
        kept: Folder of embeddings of earlier runs, which are read from it and written to it.
    """
    file = None if kept is None else kept / f"{name}.npz"
    if file is not None and file.exists():
        loaded = np.load(file)
        return loaded["vectors"], loaded["queries"]
    vectors = embedded(list(collection.documents.values()))
    queries = embedded([collection.queries[query] for query in collection.grades])
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, vectors=vectors, queries=queries)
    return vectors, queries


def embedded(texts: Sequence[str], precision: Precision | None = None) -> Vectors:
    """Return embeddings of the bundled model, shape (len(texts), dimension)."""

    async def embed() -> Vectors:
        embedder = MiniLM(QueryGate(), usable_cores(), Computation(precision=precision))
        await embedder.start()
        try:
            return await embedder.embed(texts, urgent=False)
        finally:
            await embedder.close()

    return asyncio.run(embed())
