"""What searches have found after each cell, from complete scans in the order of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import faiss
import numpy as np
import numpy.typing as npt

from ragcache_retriever.search.faiss_base import FaissBase, SearchEffort

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CellTrace:
    """One search, arrays by the number of scanned cells (from one).

    Attributes:
        scanned: Vectors that were compared.
        best: Scores of the hits, the best first, -1 for missing ones; shape (cells, top_k).
        num_new: Hits that the last cell brought.
        recall: Share of the final hits that are found.
        first_centroid_score: Score of the nearest centroid.
        rows: The final hits.
    """

    scanned: npt.NDArray[np.int64]
    best: Floats
    num_new: npt.NDArray[np.int64]
    recall: Floats
    first_centroid_score: float
    rows: frozenset[int]


def trace(
    base: FaissBase,
    vectors: npt.NDArray[np.float32],
    query: npt.NDArray[np.float32],
    top_k: int,
    effort: SearchEffort,
) -> CellTrace:
    """Scan all planned cells of a query, one at a time."""
    cells, scanned = base.planned_cells(query, effort)
    nearest_centroid = base.index.quantizer.search(query[np.newaxis], 1)[0][0, 0]
    lists = base.index.invlists
    best_scores = np.full(top_k, -1.0, np.float32)
    best_positions = np.full(top_k, -1, np.int64)
    best, held = [], []
    num_new = []
    for cell in cells.tolist():
        positions = faiss.rev_swig_ptr(lists.get_ids(cell), lists.list_size(cell))
        all_scores = np.concatenate([best_scores, vectors[positions] @ query])
        all_positions = np.concatenate([best_positions, positions])
        order = np.argsort(-all_scores, kind="stable")[:top_k]
        num_new.append(int((order >= top_k).sum()))
        best_scores, best_positions = all_scores[order], all_positions[order]
        best.append(best_scores)
        held.append(set(best_positions.tolist()))
    final = held[-1] - {-1}
    return CellTrace(
        scanned,
        np.stack(best).astype(np.float64),
        np.array(num_new),
        np.array([len(one & final) / len(final) for one in held]),
        float(nearest_centroid),
        frozenset(base.rows[sorted(final)].tolist()),
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Mean of many searches. ``computations`` are compared vectors, without centroids."""

    recall: float
    computations: float


def outcome(traces: Sequence[CellTrace], cells: Sequence[int]) -> Outcome:
    """Return what searches find that stop after so many cells, at least one each."""
    ends = [
        min(max(count, 1), len(one.scanned)) - 1 for one, count in zip(traces, cells, strict=True)
    ]
    recalls = [one.recall[end] for one, end in zip(traces, ends, strict=True)]
    scanned = [one.scanned[end] for one, end in zip(traces, ends, strict=True)]
    return Outcome(float(np.mean(recalls)), float(np.mean(scanned)))


def computations_at(outcomes: Sequence[Outcome], recall: float) -> float:
    """Return the computations of a rule at a mean recall, between its nearest settings."""
    ordered = sorted(outcomes, key=lambda one: (one.recall, one.computations))
    recalls = np.maximum.accumulate([one.recall for one in ordered])
    return float(np.interp(recall, recalls, [one.computations for one in ordered]))
