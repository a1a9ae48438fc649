"""Our walk of an HNSW graph against faiss's search of the same graph."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from bench.support.staged.stages import TOP_K
from ragcache_retriever.search.hnsw_graph import (
    DEFAULT_BUILD_EFFORT,
    DEFAULT_LINKS,
    HnswGraph,
    WalkSlice,
)

EFFORT = 64

Vectors = npt.NDArray[np.float32]


class _Gathered:
    def __init__(self, vectors: Vectors) -> None:
        self._vectors = vectors

    def gather(self, positions: npt.NDArray[np.int64]) -> Vectors:
        """Return vectors by position."""
        return self._vectors[positions]


def measure_graph(vectors: Vectors, queries: Vectors) -> dict[str, Any]:
    """Search with the same effort, and compare recall and the number of compared vectors."""
    dimension = vectors.shape[1]
    index = faiss.IndexHNSWFlat(dimension, DEFAULT_LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = DEFAULT_BUILD_EFFORT
    index.add(vectors)
    index.hnsw.efSearch = EFFORT
    graph = HnswGraph.of(index)
    exact = faiss.IndexFlatIP(dimension)
    exact.add(vectors)
    wanted = exact.search(queries, TOP_K)[1]
    faiss.cvar.hnsw_stats.reset()  # type: ignore[attr-defined]
    found = index.search(queries, TOP_K)[1]
    compared = faiss.cvar.hnsw_stats.ndis  # type: ignore[attr-defined]
    walks = [
        list(graph.walk(query, _Gathered(vectors), EFFORT, TOP_K, None, lambda: False))
        for query in queries
    ]
    ours = np.stack([walk[-1].positions for walk in walks])
    our_recall, faiss_recall = _recall(ours, wanted), _recall(found, wanted)
    return {
        "hnsw_vectors": len(vectors),
        "hnsw_recall": round(our_recall, 4),
        "hnsw_recall_over_faiss": round(our_recall / faiss_recall, 4),
        "hnsw_waste_share": round(sum(walk[-1].num_scored for walk in walks) / compared - 1, 4),
        "hnsw_mean_final_progress": round(float(np.mean([_final_at(walk) for walk in walks])), 4),
    }


def _final_at(walk: list[WalkSlice]) -> float:
    """Return the share of compared vectors after which the hits stay."""
    rows = [one.positions.tolist() for one in walk]
    first = next(i for i in range(len(rows)) if all(one == rows[-1] for one in rows[i:]))
    return walk[first].num_scored / walk[-1].num_scored


def _recall(found: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]) -> float:
    shares = [
        len(set(one.tolist()) & set(other.tolist())) / TOP_K
        for one, other in zip(found, wanted, strict=True)
    ]
    return float(np.mean(shares))
