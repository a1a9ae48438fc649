"""What searches with a declared recall find and compare, against other rules that stop a scan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support.staged.cell_traces import CellTrace, Outcome, computations_at, trace
from bench.support.staged.indexes import opened_base
from bench.support.staged.stages import TOP_K
from bench.support.staged.stopping_rules import Darth, fixed, oracle, patience
from ragcache_core.retrieval.finality.search_estimator import SearchEstimator
from ragcache_retriever.search.cell_base import CellBase, Probing
from ragcache_retriever.search.cell_scan import CellScan, Query
from ragcache_retriever.search.index_view import IndexView
from ragcache_retriever.search.scan_pool import scan_together
from ragcache_retriever.search.vector_index import IndexStage

RECALL = 0.95

_CURVE_RECALLS = (0.8, 0.9, 0.95, 0.98, 0.99)

Vectors = npt.NDArray[np.float32]


def measure_declared(
    base: CellBase, learned: Vectors, measured: Vectors, probing: Probing
) -> dict[str, Any]:
    """Search with a declared recall after complete searches, and replay the other rules."""
    view = opened_base(base)
    estimator = SearchEstimator()
    for query in learned:
        _search(view, query, None, probing, estimator)
    training = [trace(base, query, TOP_K, probing) for query in learned]
    traces = [trace(base, query, TOP_K, probing) for query in measured]
    ours = {
        recall: _declared(view, measured, traces, recall, probing, estimator)
        for recall in (RECALL, *_CURVE_RECALLS)
    }
    reached = ours[RECALL]
    rules = {
        "fixed": list(fixed(traces)),
        "darth": list(Darth(training).outcomes(traces)),
        "patience": list(patience(traces)),
        "oracle": list(oracle(traces)),
    }
    num_centroids = len(base.centroids)
    all_ours = reached.computations + num_centroids
    computations = {
        name: computations_at(outcomes, reached.recall) + num_centroids
        for name, outcomes in rules.items()
    }
    return {
        "declared_recall": RECALL,
        "declared_recall_mean": round(reached.recall, 4),
        "declared_computations": round(reached.computations),
        "complete_computations": round(float(np.mean([one.scanned[-1] for one in traces]))),
        "num_centroids": num_centroids,
        **{
            f"{name}_over_declared_computations": round(count / all_ours, 3)
            for name, count in computations.items()
        },
        "fixed_over_oracle": round(computations["fixed"] / computations["oracle"], 3),
        "fixed_over_declared_by_recall": _curve(ours, rules["fixed"], num_centroids),
        "fixed_over_oracle_by_recall": _curve(
            {
                recall: Outcome(one.recall, computations_at(rules["oracle"], one.recall))
                for recall, one in ours.items()
            },
            rules["fixed"],
            num_centroids,
        ),
    }


def _curve(
    ours: dict[float, Outcome], fixed_outcomes: Sequence[Outcome], num_centroids: int
) -> list[list[float]]:
    """Return pairs of the mean recall and the saving at it."""
    return [
        [
            round(one.recall, 4),
            round(
                (computations_at(fixed_outcomes, one.recall) + num_centroids)
                / (one.computations + num_centroids),
                3,
            ),
        ]
        for recall, one in sorted(ours.items())
        if recall in _CURVE_RECALLS
    ]


def _declared(
    view: IndexView,
    queries: Vectors,
    traces: Sequence[CellTrace],
    recall: float,
    probing: Probing,
    estimator: SearchEstimator,
) -> Outcome:
    """Search all queries. One in 32 runs to the end and counts as well."""
    recalls, computations = [], []
    for query, one in zip(queries, traces, strict=True):
        last = _search(view, query, recall, probing, estimator)
        recalls.append(len(one.rows & set(last.rows)) / len(one.rows))
        computations.append(last.num_scored)
    return Outcome(float(np.mean(recalls)), float(np.mean(computations)))


def _search(
    view: IndexView,
    query: Vectors,
    recall: float | None,
    probing: Probing,
    estimator: SearchEstimator,
) -> IndexStage:
    """Return the last stage of a search in this thread."""
    stages: list[IndexStage] = []
    wanted = Query(query, TOP_K, None, recall, lambda: False)
    scan_together([CellScan(view, wanted, probing, estimator, stages.append)])
    return stages[-1]
