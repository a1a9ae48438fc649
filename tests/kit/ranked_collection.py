"""A collection of short texts, ranked by the retriever's own code over a real store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ragcache_core.retrieval.fusion import DEFAULT_LEXICAL_WEIGHT
from ragcache_retriever.documents.chunking import Chunk
from ragcache_retriever.ranking.hybrid import HybridRanking
from ragcache_retriever.ranking.search import Search, SearchedChunks, SearchMode, SearchStage
from ragcache_retriever.search.vector_index import IndexStage, Vectors
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import ChunkSet, DocumentVersion
from tests.kit.stored_documents import NOW_MS, a_document, add_collection, digest_of_text

DIMENSION = 4


def unit(*values: float) -> Vectors:
    vector = np.array(values, np.float32)
    return vector / np.linalg.norm(vector)


@dataclass(slots=True)
class StagesIndex:
    """An index whose stages a test sets: rows and scores, the last one final."""

    stages: list[list[tuple[int, float]]] = field(default_factory=list)
    probability: float = 0.5

    def search(self, query: Vectors, top_k: int, **_: object) -> Iterator[IndexStage]:
        for i, hits in enumerate(self.stages, 1):
            rows, scores = zip(*hits, strict=True) if hits else ((), ())
            final = i == len(self.stages)
            probability = 1.0 if final else self.probability
            progress = i / len(self.stages)
            yield IndexStage(rows[:top_k], scores[:top_k], progress, final, probability, 0)


@dataclass(slots=True)
class RankedCollection:
    """Texts in a store. ``rows`` are those of the texts, in their order."""

    store: DocumentStore
    generation: int
    rows: list[int]
    vectors: Vectors

    def exact_index(self, query: Vectors) -> StagesIndex:
        """Return an index with one stage, by exact similarity."""
        scores = self.vectors @ query
        order = np.argsort(-scores, kind="stable")
        return StagesIndex([[(self.rows[i], float(scores[i])) for i in order]])

    def search(
        self,
        ranking: HybridRanking,
        question: str,
        query: Vectors | None = None,
        index: StagesIndex | None = None,
        *,
        top_k: int = 5,
        mode: SearchMode = SearchMode.AUTO,
        lexical_weight: float = DEFAULT_LEXICAL_WEIGHT,
        min_score: float | None = None,
        diversity: float = 0.0,
    ) -> list[SearchStage]:
        """Return the stages of a search."""
        search = Search(
            "c",
            question,
            top_k,
            mode,
            min_score=min_score,
            diversity=diversity,
            vector=query,
        )
        searched: Any = index or (None if query is None else self.exact_index(query))
        chunks = SearchedChunks(self.store, self.generation, searched, lexical_weight)
        return list(ranking.stages(search, chunks))

    def indexes(self, stage: SearchStage) -> list[int]:
        """Return which texts a stage has."""
        return [self.rows.index(one.row) for one in stage.hits]


def ranked_collection(
    store: DocumentStore, texts: Sequence[str], vectors: Sequence[Vectors], name: str = "c"
) -> RankedCollection:
    """Return a collection with one document for each text. Later ones are newer."""
    generation = add_collection(store, name)
    rows: list[int] = []
    for i, (text, vector) in enumerate(zip(texts, vectors, strict=True)):
        document = a_document(f"d{i}", text)
        chunks = ChunkSet(
            "tokenizer", [Chunk(text, ())], [digest_of_text(text)[:32]], [b""], vector[np.newaxis]
        )
        with store.database.transaction():
            change = store.documents.replace(
                name,
                document,
                DocumentVersion(document.content_hash(), i),
                {generation: chunks},
                now_ms=NOW_MS,
                claim=False,
            )
            store.database.commit()
        rows += change.indexes[0].added
    return RankedCollection(store, generation, rows, np.stack(list(vectors)))
