"""When the hits of staged searches are final, and what stages cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from bench.support.staged.calibration import calibration_error
from bench.support.staged.indexes import opened_base
from ragcache_core.retrieval.finality.search_estimator import SearchEstimator
from ragcache_retriever.search.cell_base import CellBase, Probing
from ragcache_retriever.search.cell_scan import CellScan, Query
from ragcache_retriever.search.files.stored_vectors import exact_scores
from ragcache_retriever.search.index_view import IndexView
from ragcache_retriever.search.scan_pool import scan_together
from ragcache_retriever.search.vector_index import IndexStage

TOP_K = 10
WHOLE = Probing(0, 1.0)

_BLOCK = 4096
_SPARE = 8
_ROUNDING = 1e-5

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
    base: CellBase, vectors: Vectors, learned: Vectors, measured: Vectors, probing: Probing
) -> dict[str, Any]:
    """Measure complete searches, of the whole collection and of the default plan."""
    view = opened_base(base)
    whole, _ = _measure(view, learned, measured, WHOLE)
    probed, estimated = _measure(view, learned, measured, probing)
    return {
        "final_share_by_stage": whole["final_share_by_stage"],
        "progress_by_stage": whole["progress_by_stage"],
        "nonoverlap_ratio": whole["nonoverlap_ratio"],
        "probing_nonoverlap_ratio": probed["nonoverlap_ratio"],
        "total_overhead": probed["total_overhead"],
        "total_overhead_of_whole": whole["total_overhead"],
        "plain_ms": probed["plain_ms"],
        "ece": max(whole["ece"], probed["ece"]),
        "recall_equals_plain": equals_faiss(base, measured, probing, estimated),
        "probing_recall": _recall(vectors, measured, estimated),
    }


def _measure(
    view: IndexView, learned: Vectors, measured: Vectors, probing: Probing
) -> tuple[dict[str, Any], list[Staged]]:
    estimator = SearchEstimator()
    for query in learned:
        search(view, query, probing, estimator)
    searches, plain_s = [], []
    for query in measured:
        # In turns, so that other load on the machine meets both alike.
        searches.append(search(view, query, probing, estimator))
        plain_s.append(_timed(partial(plain_scan, view.base, query, probing)))
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
    }, searches


def search(view: IndexView, query: Vectors, probing: Probing, estimator: SearchEstimator) -> Staged:
    """Search in this thread."""
    stages: list[IndexStage] = []
    times_s: list[float] = []
    began = time.thread_time()

    def emit(stage: IndexStage) -> None:
        stages.append(stage)
        times_s.append(time.thread_time() - began)

    wanted = Query(query, TOP_K, None, None, lambda: False)
    scan_together([CellScan(view, wanted, probing, estimator, emit)])
    return Staged(stages, times_s)


def plain_scan(base: CellBase, query: Vectors, probing: Probing) -> tuple[int, ...]:
    """Scan the planned cells once, without stages. It ranks as the staged search does."""
    cells = np.sort(base.plan(query, probing).cells)
    wanted = TOP_K + _SPARE
    scores, positions = [], []
    for cell in cells.tolist():
        first, last = int(base.offsets[cell]), int(base.offsets[cell + 1])
        for begin in range(first, last, _BLOCK):
            end = min(begin + _BLOCK, last)
            scores.append(base.vectors.scores(begin, end, query[np.newaxis])[:, 0])
            positions.append(np.arange(begin, end))
    all_scores, all_positions = np.concatenate(scores), np.concatenate(positions)
    kth = np.partition(all_scores, -wanted)[-wanted] if len(all_scores) > wanted else -np.inf
    found = all_positions[all_scores >= kth - _ROUNDING]
    exact = exact_scores(base.vectors.gather(found), query)
    rows = base.rows[found]
    return tuple(rows[np.lexsort((rows, -exact))[:TOP_K]].tolist())


def equals_faiss(
    base: CellBase, queries: Vectors, probing: Probing, searches: Sequence[Staged]
) -> bool:
    """Return whether faiss finds the same rows in the same cells (IndexIVFFlat, same nprobe)."""
    dimension = queries.shape[1]
    quantizer = faiss.IndexFlatIP(dimension)
    quantizer.add(np.ascontiguousarray(base.centroids))
    ivf = faiss.IndexIVFFlat(quantizer, dimension, len(base.centroids), faiss.METRIC_INNER_PRODUCT)
    ivf.is_trained = True
    cells = np.repeat(np.arange(len(base.centroids)), np.diff(base.offsets))
    stored = base.vectors.gather(np.arange(len(base)))
    ivf.add_core(
        len(base), faiss.swig_ptr(stored), faiss.swig_ptr(base.rows.copy()), faiss.swig_ptr(cells)
    )
    for query, one in zip(queries, searches, strict=True):
        plan = base.plan(query, probing)
        ranked = quantizer.search(query[np.newaxis], len(base.centroids))[1][0]
        ivf.nprobe = int(np.flatnonzero(ranked == plan.cells[-1])[0]) + 1
        scores, rows = ivf.search(query[np.newaxis], TOP_K)
        last = one.stages[-1]
        # Equal vectors may be exchanged, so that scores decide.
        same_rows = set(rows[0].tolist()) == set(last.rows)
        if not (same_rows or np.allclose(scores[0], last.scores, atol=1e-6, rtol=0)):
            return False
    return True


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


def _timed(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began
