"""Vectors and plain searches for tests of vector indexes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from ragcache_retriever.search.faiss_base import SearchEffort
from ragcache_retriever.search.vector_index import IndexStage, RowIndex, Rows, VectorIndex, Vectors

DIMENSION = 16
NONE: Vectors = np.empty((0, DIMENSION), np.float32)
EVERYTHING = SearchEffort(exact_limit=1 << 40)


def unit(vectors: np.ndarray) -> Vectors:
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)


def clustered(count: int, seed: int, dimension: int = DIMENSION) -> Vectors:
    """Vectors the way texts lie: in clusters, each with its own width."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(max(1, count // 40), dimension))
    widths = rng.uniform(0.2, 0.8, size=(len(centres), 1))
    chosen = rng.integers(0, len(centres), count)
    return unit(centres[chosen] + widths[chosen] * rng.normal(size=(count, dimension)))


def nearest(rows: Rows, vectors: Vectors, query: Vectors, top_k: int) -> tuple[int, ...]:
    """The rows of a plain search, by scores that depend on two vectors alone."""
    scores = np.einsum("ij,j->i", vectors, query)
    return tuple(int(rows[i]) for i in np.lexsort((rows, -scores))[:top_k])


def final(
    index: VectorIndex, query: Vectors, top_k: int, allowed: Rows | None = None
) -> IndexStage:
    stages = list(index.search(query, top_k, allowed=allowed))
    assert stages[-1].final
    assert not any(stage.final for stage in stages[:-1])
    return stages[-1]


def add(index: VectorIndex, rows: Sequence[int], vectors: Vectors) -> None:
    index.apply((), rows, vectors)


def wait_until_built(index: RowIndex) -> None:
    while index.is_building:
        threading.Event().wait(0.005)
