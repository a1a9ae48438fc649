"""One search over the cells of a view, in steps that several searches take together.

A search scans its planned cells in groups. After each group there is a checkpoint: the best hits so
far are known, and the search may end there. Some checkpoints are the ends of stages, which the
caller gets.

Source: RAGCache section 5.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ragcache_core.retrieval.finality.features import StageFeatures
from ragcache_core.retrieval.finality.search_estimator import SearchEstimator
from ragcache_retriever.search.cell_base import Probing
from ragcache_retriever.search.files.stored_vectors import Positions
from ragcache_retriever.search.index_view import IndexView
from ragcache_retriever.search.vector_index import IndexStage, Rows, Vectors

STAGE_SHARES: Final = (1 / 8, 1 / 4, 1 / 2, 1.0)
"""Share of the scan at the end of each stage. After 13 % of the scan, 95 % of searches have their
final hits (RAGCache Fig. 8)."""

CHECKPOINT_SHARE: Final = 1 / 32
"""Least share of the scan between two checkpoints."""

TAIL: Final = -1
"""Stands for the cell of the rows that were added after the base was built."""

_SPARE_HITS: Final = 8
"""Hits beyond the wanted ones whose exact score is computed, because products are rounded."""


@dataclass(frozen=True, slots=True)
class Query:
    """What a search looks for, see VectorIndex.search.

    Attributes:
        allowed: Positions that may be found; None: all.
    """

    vector: Vectors
    top_k: int
    allowed: Positions | None
    recall: float | None
    cancelled: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The hits at one moment of a search."""

    features: StageFeatures
    rows: tuple[int, ...]


class CellScan:
    """The state of one search.

    Args:
        emit: Receives each stage.
        estimator: Tells how likely the hits are final, and whether to stop.
    """

    def __init__(
        self,
        view: IndexView,
        query: Query,
        probing: Probing,
        estimator: SearchEstimator,
        emit: Callable[[IndexStage], None],
    ) -> None:
        self.view = view
        self.query = query
        self.is_done = False
        self._emit = emit
        self._estimator = estimator
        self._live = view.live_mask(query.allowed)
        in_cells = None
        if query.allowed is not None and self._live is not None:
            in_cells = view.base.num_in_cells(self._live[: len(view.base)])
        self._plan = view.base.plan(query.vector, probing, in_cells)
        self._ends = checkpoints(self._plan.scanned)
        self._stage_ends = stage_ends(self._plan.scanned, self._ends)
        self._may_stop = query.recall is not None and estimator.may_stop()
        self._wanted = query.top_k + _SPARE_HITS
        self._found: dict[int, list[tuple[Positions, Vectors]]] = {}  # by cell
        self.threshold = -np.inf
        self._best_positions = np.empty(0, np.int64)
        self._best_scores = np.empty(0, np.float32)
        self._num_scored = 0
        self._next = 0  # checkpoint
        self._changed_at = 0.0
        self._history: list[Checkpoint] = []

    @property
    def cells(self) -> Positions:
        """All cells that the search may scan, nearest first."""
        return self._plan.cells

    def next_cells(self) -> Positions:
        """Return the cells until the next checkpoint."""
        begin = self._ends[self._next - 1] if self._next else 0
        return self._plan.cells[begin : self._ends[self._next]]

    def take(self, cell: int, begin: int, scores: Vectors, *, is_due: bool = True) -> None:
        """Take the scores of consecutive positions.

        Args:
            cell: The cell of the positions, TAIL for those after the base.
            begin: The first position.
            scores: Shape (n,). Those below ``threshold`` need not be right.
            is_due: Whether the cell belongs before the next checkpoint. Otherwise another search
                needed it now, and its hits are kept for later.
        """
        passing = scores >= self.threshold
        if self._live is not None:
            passing &= self._live[begin : begin + len(scores)]
        found = np.flatnonzero(passing)
        if not len(found):
            return
        if len(found) > self._wanted:
            # Scores that tie with the last one in the last bits stay, see ``exact_scores``.
            kth = float(np.partition(scores[found], -self._wanted)[-self._wanted])
            found = found[scores[found] >= kth - _ROUNDING]
            if is_due:
                self.threshold = max(self.threshold, kth - _ROUNDING)
        self._found.setdefault(cell, []).append((begin + found, scores[found]))

    def count(self, num_scored: int) -> None:
        """Count vectors that were compared with the query."""
        self._num_scored += num_scored

    def checkpoint(self) -> None:
        """Rank the hits so far, then end the stage or the search if it is time."""
        before = self._rows()
        self._rank()
        rows = self._rows()
        is_last = self._next == len(self._ends) - 1
        progress = 1.0 if is_last else self._progress()
        if rows != before:
            self._changed_at = progress
        features = self._features(progress, before, rows)
        self._history.append(Checkpoint(features, rows))
        stops = (
            not is_last
            and self._may_stop
            and self._estimator.should_stop(features, self.query.recall or 1.0)
        )
        if is_last or stops or self._ends[self._next] in self._stage_ends:
            is_final = is_last or stops
            probability = 1.0 if is_final else self._estimator.probability(features)
            self._emit(
                IndexStage(
                    rows, self._hit_scores(), progress, is_final, probability, self._num_scored
                )
            )
        self.is_done = is_last or stops
        self._next += 1
        if is_last and not self._may_stop:
            self._estimator.learn([(one.features, one.rows) for one in self._history])

    def _progress(self) -> float:
        return float(self._plan.scanned[self._ends[self._next] - 1]) / self._plan.total

    def _rank(self) -> None:
        """Merge what the cells before this checkpoint have found into the best hits."""
        if not self._found:
            return
        found = self._found.pop(TAIL, [])
        for cell in self.next_cells().tolist():
            found += self._found.pop(cell, ())
        if not found:
            return
        positions = np.concatenate([one for one, _ in found])
        scores = np.concatenate([one for _, one in found])
        if len(positions) > self._wanted:
            kth = np.partition(scores, -self._wanted)[-self._wanted]
            positions = positions[scores >= kth - _ROUNDING]
        # A cell that was scanned early has hits that are too low by now; they fall out here.
        exact = self.view.scores_at(positions, self.query.vector)
        positions = np.concatenate([self._best_positions, positions])
        exact = np.concatenate([self._best_scores, exact])
        best = np.lexsort((self.view.rows_at(positions), -exact))[: self._wanted]
        self._best_positions, self._best_scores = positions[best], exact[best]
        if len(best) == self._wanted:
            self.threshold = max(self.threshold, float(self._best_scores[-1]) - _ROUNDING)

    def _rows(self) -> tuple[int, ...]:
        best: Rows = self.view.rows_at(self._best_positions[: self.query.top_k])
        return tuple(best.tolist())

    def _hit_scores(self) -> tuple[float, ...]:
        return tuple(self._best_scores[: self.query.top_k].tolist())

    def _features(
        self, progress: float, before: Sequence[int], rows: Sequence[int]
    ) -> StageFeatures:
        scores = self._best_scores[: self.query.top_k]
        end = self._ends[self._next]
        has_more = end < len(self._plan.cells)
        return StageFeatures(
            progress=progress,
            top_k=self.query.top_k,
            kth_score=float(scores[-1]) if len(scores) == self.query.top_k else -1.0,
            best_score=float(scores[0]) if len(scores) else -1.0,
            next_bound=float(self._plan.bounds[end]) if has_more else -1.0,
            next_centroid_score=float(self._plan.centroid_scores[end]) if has_more else -1.0,
            unchanged=progress - self._changed_at,
            num_changes=len(set(rows) - set(before)),
        )


_ROUNDING: Final = 1e-5
"""Products differ from exact scores by less."""


def checkpoints(scanned: Positions) -> list[int]:
    """Return the number of scanned cells at each checkpoint, at least one.

    Args:
        scanned: Vectors after each cell, ascending.
    """
    if not len(scanned):
        return [0]
    total = int(scanned[-1])
    shares = np.arange(CHECKPOINT_SHARE, 1, CHECKPOINT_SHARE)
    ends = set((np.searchsorted(scanned, shares * total) + 1).tolist())
    return sorted({end for end in ends if end < len(scanned)} | {len(scanned)})


def stage_ends(scanned: Positions, ends: Sequence[int]) -> set[int]:
    """Return the checkpoints that end a stage: the first ones at or after the stages' shares."""
    if not len(scanned):
        return {0}
    reached = scanned[np.array(ends) - 1] / scanned[-1]
    found = np.searchsorted(reached, np.array(STAGE_SHARES) - 1e-9)
    return {ends[min(int(i), len(ends) - 1)] for i in found}
