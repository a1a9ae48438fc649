"""Staged searches of an HNSW graph against one search of the same graph by faiss."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from bench.support.staged.indexes import build, searched
from bench.support.staged.stages import TOP_K, search
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.search.faiss_base import SearchEffort

EFFORT = SearchEffort(beam=64)

Vectors = npt.NDArray[np.float32]


def measure_graph(vectors: Vectors, queries: Vectors) -> dict[str, Any]:
    """Search with the same beam, and compare recall and the number of compared vectors."""
    base = build(vectors, IndexKind.HNSW)
    exact = faiss.IndexFlatIP(vectors.shape[1])
    exact.add(vectors)
    wanted = exact.search(queries, TOP_K)[1]
    statistics = faiss.cvar.hnsw_stats  # type: ignore[attr-defined]
    statistics.reset()
    parameters = faiss.SearchParametersHNSW(  # type: ignore[attr-defined]
        efSearch=EFFORT.beam
    )
    found = base.index.search(queries, TOP_K, params=parameters)[1]
    compared = statistics.ndis
    statistics.reset()
    with searched(base, EFFORT) as index:
        searches = [search(index, query) for query in queries]
    ours = np.array([one.stages[-1].rows for one in searches])
    our_recall, faiss_recall = _recall(ours, wanted), _recall(found, wanted)
    final_at = [one.stages[one.first_final].progress for one in searches]
    return {
        "hnsw_vectors": len(vectors),
        "hnsw_recall": round(our_recall, 4),
        "hnsw_recall_over_faiss": round(our_recall / faiss_recall, 4),
        "hnsw_waste_share": round(statistics.ndis / compared - 1, 4),
        "hnsw_mean_final_progress": round(float(np.mean(final_at)), 4),
    }


def _recall(found: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]) -> float:
    shares = [
        len(set(one.tolist()) & set(other.tolist())) / TOP_K
        for one, other in zip(found, wanted, strict=True)
    ]
    return float(np.mean(shares))
