"""What searches with a declared recall find and compare, against a fixed number of cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support.staged.cell_traces import (
    CellTrace,
    Outcome,
    computations_at,
    fixed,
    oracle,
    trace,
)
from bench.support.staged.indexes import searched
from bench.support.staged.stages import TOP_K
from ragcache_retriever.search.faiss_base import FaissBase, SearchEffort
from ragcache_retriever.search.faiss_index import FaissIndex

RECALL = 0.95

_CURVE_RECALLS = (0.8, 0.9, 0.95, 0.98, 0.99)

Vectors = npt.NDArray[np.float32]


def measure_declared(
    base: FaissBase, vectors: Vectors, learned: Vectors, measured: Vectors, effort: SearchEffort
) -> dict[str, Any]:
    """Search with a declared recall after complete searches, and replay the other rules."""
    traces = [trace(base, vectors, query, TOP_K, effort) for query in measured]
    with searched(base, effort) as index:
        for query in learned:
            list(index.search(query, TOP_K))
        ours = {
            recall: _declared(index, measured, traces, recall)
            for recall in (RECALL, *_CURVE_RECALLS)
        }
    reached = ours[RECALL]
    rules = {
        "fixed": list(fixed(traces)),
        "oracle": list(oracle(traces)),
    }
    num_centroids = base.index.nlist
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
    index: FaissIndex, queries: Vectors, traces: Sequence[CellTrace], recall: float
) -> Outcome:
    """Search all queries. One in 32 runs to the end and counts as well."""
    recalls, computations = [], []
    for query, one in zip(queries, traces, strict=True):
        *_, last = index.search(query, TOP_K, recall=recall)
        recalls.append(len(one.rows & set(last.rows)) / len(one.rows))
        computations.append(last.num_scored)
    return Outcome(float(np.mean(recalls)), float(np.mean(computations)))
