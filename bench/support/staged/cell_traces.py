"""What searches have found after each cell, and what rules that stop a scan of cells would find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import faiss
import numpy as np
import numpy.typing as npt

from ragcache_retriever.search.faiss_base import FaissBase, SearchEffort

_ORACLE_PRICES = np.geomspace(1, 1e7, 200)


@dataclass(frozen=True, slots=True)
class CellTrace:
    """One complete search, arrays by the number of scanned cells (from one).

    Attributes:
        scanned: Vectors that were compared.
        recall: Share of the final hits that are found.
        rows: The final hits.
    """

    scanned: npt.NDArray[np.int64]
    recall: npt.NDArray[np.float64]
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
    lists = base.index.invlists
    scores = np.full(top_k, -1.0, np.float32)
    positions = np.full(top_k, -1, np.int64)
    held = []
    for cell in cells.tolist():
        scanned_now = faiss.rev_swig_ptr(lists.get_ids(cell), lists.list_size(cell))
        scores = np.concatenate([scores, vectors[scanned_now] @ query])
        positions = np.concatenate([positions, scanned_now])
        order = np.argsort(-scores, kind="stable")[:top_k]
        scores, positions = scores[order], positions[order]
        held.append(set(positions.tolist()))
    final = held[-1] - {-1}
    recall = np.array([len(one & final) / len(final) for one in held])
    return CellTrace(scanned, recall, frozenset(base.rows[sorted(final)].tolist()))


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


def fixed(traces: Sequence[CellTrace]) -> Iterator[Outcome]:
    """Scan the same number of cells in each search (nprobe)."""
    for count in range(1, max(len(one.scanned) for one in traces) + 1):
        yield outcome(traces, [count] * len(traces))


def oracle(traces: Sequence[CellTrace]) -> Iterator[Outcome]:
    """Stop each search where it serves all of them best, knowing what later cells hold.

    No rule that scans the cells in this order reaches more mean recall with these computations.
    """
    for price in _ORACLE_PRICES:
        yield outcome(
            traces, [int(np.argmin(one.scanned - price * one.recall)) + 1 for one in traces]
        )


def computations_at(outcomes: Sequence[Outcome], recall: float) -> float:
    """Return the computations of a rule at a mean recall, between its nearest settings."""
    ordered = sorted(outcomes, key=lambda one: (one.recall, one.computations))
    recalls = np.maximum.accumulate([one.recall for one in ordered])
    return float(np.interp(recall, recalls, [one.computations for one in ordered]))
