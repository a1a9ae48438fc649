"""One search over the cells of a view, in steps that several searches take together.

A search scans its planned cells in groups. After each group there is a checkpoint: the best hits so
far are known, and the search may end there. Some checkpoints are the ends of stages, which the
caller gets.

Source: RAGCache section 5.3.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ragcache_core.retrieval.finality.cell_geometry import expected_above
from ragcache_core.retrieval.finality.features import StageFeatures
from ragcache_core.retrieval.finality.running_search import RunningSearch
from ragcache_core.retrieval.finality.search_estimator import SearchEstimator
from ragcache_retriever.search.cell_base import Probing
from ragcache_retriever.search.files.stored_vectors import Positions
from ragcache_retriever.search.index_view import IndexView
from ragcache_retriever.search.vector_index import IndexStage, Vectors

STAGE_SHARES: Final = (1 / 8, 1 / 4, 1 / 2, 1.0)
"""Share of the scan at the end of each stage. After 13 % of the scan, 95 % of searches have their
final hits (RAGCache Fig. 8)."""

CHECKPOINT_GROWTH: Final = 1.2
"""Each checkpoint comes after so many times the vectors of the one before, and at least one cell.
Most searches need a few cells only, so that the first ones are checked singly."""

TAIL: Final = -1
"""Stands for the cell of the rows that were added after the base was built."""

SPARE_HITS: Final = 8
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
        self._live = view.live_mask(query.allowed)
        in_cells = None
        if query.allowed is not None and self._live is not None:
            in_cells = view.base.num_in_cells(self._live[: len(view.base)])
        self._plan = view.base.plan(query.vector, probing, in_cells)
        self._ends = checkpoints(self._plan.scanned)
        self._stage_ends = stage_ends(self._plan.scanned, self._ends)
        self._search = RunningSearch(estimator, query.recall)
        self._wanted = query.top_k + SPARE_HITS
        self._found: dict[int, list[tuple[Positions, Vectors]]] = {}  # by cell
        self.threshold = -np.inf
        self._best_positions = np.empty(0, np.int64)
        self._best_scores = np.empty(0, np.float32)
        self._num_scored = 0
        self._next = 0  # checkpoint

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
        is_last = self._next == len(self._ends) - 1
        progress = 1.0 if is_last else self._progress()
        self._update_rows(progress)
        ends_stage = is_last or self._ends[self._next] in self._stage_ends
        if ends_stage or self._search.needs_features:
            features = self._features(progress)
            stops = not is_last and self._search.may_stop_at(features)
            self.is_done = is_last or stops
            if ends_stage or stops:
                probability = 1.0 if self.is_done else self._search.probability(features)
                self._emit(self._stage(progress, probability))
            if is_last:
                self._search.complete(features)
        self._next += 1

    def _stage(self, progress: float, probability: float) -> IndexStage:
        return IndexStage(
            rows=self._search.rows,
            scores=tuple(self._best_scores[: self.query.top_k].tolist()),
            progress=progress,
            final=self.is_done,
            final_probability=probability,
            num_scored=self._num_scored,
        )

    def _update_rows(self, progress: float) -> None:
        """Rank what was found, and note what has changed since the last checkpoint."""
        rows = self._search.rows
        if self._rank():
            best = self._best_positions[: self.query.top_k]
            rows = tuple(self.view.rows_at(best).tolist())
        self._search.update(rows, progress)

    def _progress(self) -> float:
        return float(self._plan.scanned[self._ends[self._next] - 1]) / self._plan.total

    def _rank(self) -> bool:
        """Merge what the cells before this checkpoint have found. Return whether they found any."""
        if not self._found:
            return False
        found = self._found.pop(TAIL, [])
        for cell in self.next_cells().tolist():
            found += self._found.pop(cell, ())
        if not found:
            return False
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
        return True

    def _features(self, progress: float) -> StageFeatures:
        scores = self._best_scores[: self.query.top_k]
        end = self._ends[self._next]
        has_more = end < len(self._plan.cells)
        kth_score = float(scores[-1]) if len(scores) == self.query.top_k else -1.0
        expected = expected_above(kth_score, self._plan.centroid_scores, self._plan.shapes)
        return StageFeatures(
            progress=progress,
            top_k=self.query.top_k,
            kth_score=kth_score,
            best_score=float(scores[0]) if len(scores) else -1.0,
            next_bound=float(self._plan.bounds[end]) if has_more else -1.0,
            next_centroid_score=float(self._plan.centroid_scores[end]) if has_more else -1.0,
            unchanged=self._search.unchanged_share(progress),
            num_changes=self._search.num_changes,
            expected_better=float(expected[end:].sum()),
            expected_found=float(expected[:end].sum()),
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
    totals = scanned.tolist()
    ends: list[int] = []
    num_scanned = 0
    while not ends or ends[-1] < len(totals):
        end = bisect.bisect_left(totals, CHECKPOINT_GROWTH * num_scanned) + 1
        ends.append(min(max(end, ends[-1] + 1 if ends else 1), len(totals)))
        num_scanned = totals[ends[-1] - 1]
    return ends


def stage_ends(scanned: Positions, ends: Sequence[int]) -> set[int]:
    """Return the checkpoints that end a stage: the first ones at or after the stages' shares."""
    if not len(scanned):
        return {0}
    reached = scanned[np.array(ends) - 1] / scanned[-1]
    found = np.searchsorted(reached, np.array(STAGE_SHARES) - 1e-9)
    return {ends[min(int(i), len(ends) - 1)] for i in found}
