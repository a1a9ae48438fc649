"""When the hits of staged searches are final, and what stages cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from bench.support.staged.calibration import calibration_error
from bench.support.staged.indexes import searched
from ragcache_retriever.search.faiss_base import FaissBase, SearchEffort
from ragcache_retriever.search.faiss_index import FaissIndex
from ragcache_retriever.search.vector_index import IndexStage

TOP_K = 10
WHOLE = SearchEffort(0, 1.0)

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Staged:
    """The stages of a search, and the CPU seconds from its begin until each.

    A search runs on one thread and waits for nothing, so that other load does not count.
    """

    stages: Sequence[IndexStage]
    times_s: Sequence[float]

    @property
    def first_final(self) -> int:
        """The first stage from which on the hits stay."""
        rows = [stage.rows for stage in self.stages]
        return next(i for i in range(len(rows)) if all(one == rows[-1] for one in rows[i:]))


def measure_stages(
    base: FaissBase, vectors: Vectors, learned: Vectors, measured: Vectors, effort: SearchEffort
) -> dict[str, Any]:
    """Measure complete searches, of the whole collection and of the default plan."""
    whole, _ = _measure(base, learned, measured, WHOLE)
    probed, searches = _measure(base, learned, measured, effort)
    return {
        "final_share_by_stage": whole["final_share_by_stage"],
        "progress_by_stage": whole["progress_by_stage"],
        "nonoverlap_ratio": whole["nonoverlap_ratio"],
        "probing_nonoverlap_ratio": probed["nonoverlap_ratio"],
        "total_overhead": probed["total_overhead"],
        "total_overhead_of_whole": whole["total_overhead"],
        "plain_ms": probed["plain_ms"],
        "ece": max(whole["ece"], probed["ece"]),
        "recall_equals_plain": whole["equals_plain"] and probed["equals_plain"],
        "probing_recall": _recall(vectors, measured, searches),
    }


def _measure(
    base: FaissBase, learned: Vectors, measured: Vectors, effort: SearchEffort
) -> tuple[dict[str, Any], list[Staged]]:
    searches, plain_s = [], []
    equals_plain = True
    with searched(base, effort) as index:
        for query in learned:
            search(index, query)
        for query in measured:
            # In turns, so that other load on the machine meets both alike.
            searches.append(search(index, query))
            nprobe = _nprobe(base, query, effort)
            began = time.thread_time()
            found = plain_search(base, query, nprobe)
            plain_s.append(time.thread_time() - began)
            equals_plain &= found == _hits(searches[-1].stages[-1])
    times = np.array([one.times_s[-1] for one in searches])
    overlaps = [one.times_s[one.first_final] for one in searches]
    depth = max(len(one.stages) for one in searches)
    return {
        "final_share_by_stage": _by_stage(searches, depth, lambda one, i: i >= one.first_final),
        "progress_by_stage": _by_stage(searches, depth, lambda one, i: one.stages[i].progress),
        "nonoverlap_ratio": round(float(np.mean(overlaps) / np.mean(plain_s)), 4),
        "total_overhead": round(float(np.median(times / np.array(plain_s))), 3),
        "plain_ms": round(float(np.median(plain_s)) * 1e3, 2),
        "ece": calibration_error(_claims(searches)),
        "equals_plain": equals_plain,
    }, searches


def search(index: FaissIndex, query: Vectors) -> Staged:
    """Search in this thread."""
    stages: list[IndexStage] = []
    times_s: list[float] = []
    began = time.thread_time()
    for stage in index.search(query, TOP_K):
        times_s.append(time.thread_time() - began)
        stages.append(stage)
    return Staged(stages, times_s)


def plain_search(base: FaissBase, query: Vectors, nprobe: int) -> dict[int, float]:
    """Return the rows and scores of one search by faiss."""
    parameters = faiss.SearchParametersIVF(nprobe=nprobe)  # type: ignore[call-arg]
    scores, positions = base.index.search(query[np.newaxis], TOP_K, params=parameters)
    rows = base.rows[positions[0][positions[0] >= 0]]
    return dict(zip(rows.tolist(), scores[0].tolist(), strict=False))


def _nprobe(base: FaissBase, query: Vectors, effort: SearchEffort) -> int:
    """Return the cells that faiss has to scan for the same vectors, empty ones included."""
    last = base.planned_cells(query, effort)[0][-1]
    ranked = base.index.quantizer.search(query[np.newaxis], base.index.nlist)[1][0]
    return int(np.flatnonzero(ranked == last)[0]) + 1


def _hits(stage: IndexStage) -> dict[int, float]:
    return dict(zip(stage.rows, stage.scores, strict=True))


def _recall(vectors: Vectors, queries: Vectors, searches: Sequence[Staged]) -> float:
    """Return the recall of the planned cells against a scan of all vectors."""
    flat = faiss.IndexFlatIP(vectors.shape[1])
    flat.add(vectors)
    exact = flat.search(queries, TOP_K)[1]
    shares = [
        len(set(rows.tolist()) & set(one.stages[-1].rows)) / TOP_K
        for rows, one in zip(exact, searches, strict=True)
    ]
    return round(float(np.mean(shares)), 4)


def _claims(searches: Sequence[Staged]) -> list[tuple[float, bool]]:
    """Return what all stages but the last have claimed."""
    return [
        (stage.final_probability, stage.rows == one.stages[-1].rows)
        for one in searches
        for stage in one.stages[:-1]
    ]


def _by_stage(
    searches: Sequence[Staged], depth: int, value: Callable[[Staged, int], float]
) -> list[float]:
    return [
        round(float(np.mean([value(one, min(i, len(one.stages) - 1)) for one in searches])), 4)
        for i in range(depth)
    ]
