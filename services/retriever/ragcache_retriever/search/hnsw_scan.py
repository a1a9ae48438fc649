"""One search over the graph of a view, in stages. The rows of the tail are compared first.

A walk looks for rows that may be found near the query. If these are few or far away, it goes on and
on. Then the search compares them with the query directly, so that it takes twice as long at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from ragcache_core.retrieval.finality.features import NO_SCORE, StageFeatures
from ragcache_core.retrieval.finality.running_search import RunningSearch
from ragcache_core.retrieval.finality.search_estimator import SearchEstimator
from ragcache_retriever.search.cell_scan import SPARE_HITS, STAGE_SHARES, Query
from ragcache_retriever.search.files.stored_vectors import Positions, blocks
from ragcache_retriever.search.hnsw_graph import STEPS_PER_EFFORT, HnswGraph, Mask, WalkSlice
from ragcache_retriever.search.index_view import IndexView
from ragcache_retriever.search.vector_index import IndexStage, Vectors

ROWS_PER_STEP: Final = 100
"""Rows that are compared directly in the time of one step of a walk. With 384 numbers a vector, 146
were measured in float32 and 73 in sq8."""

_MIN_STEPS: Final = 2
"""A walk may have so many times the usual steps, in any case."""
_TAIL_BLOCK: Final = 4096
_NOTHING_KNOWN: Final = 1.0
"""A graph gives no bound of the scores that the rest of a walk can find."""


def few_for_a_walk(num_vectors: int, effort: int) -> int:
    """Return the most allowed rows that are cheaper to compare than to find by a walk.

    A walk has to see ``num_vectors / allowed`` vectors for each allowed one. So its steps cost as
    much as comparing ``effort * num_vectors / allowed * ROWS_PER_STEP`` rows.
    """
    return math.isqrt(int(STEPS_PER_EFFORT * effort * num_vectors * ROWS_PER_STEP))


class HnswScan:
    """The state of one search.

    Args:
        effort: Candidates that the walk keeps (efSearch).
    """

    def __init__(
        self,
        view: IndexView,
        graph: HnswGraph,
        query: Query,
        effort: int,
        estimator: SearchEstimator,
    ) -> None:
        self._view = view
        self._graph = graph
        self._query = query
        self._effort = effort
        self._search = RunningSearch(estimator, query.recall)
        self._wanted = query.top_k + SPARE_HITS
        self._live = view.live_mask(query.allowed)
        num_live = len(view) if query.allowed is None else len(query.allowed)
        usual_steps = STEPS_PER_EFFORT * max(effort, self._wanted)
        self._max_steps = max(num_live / ROWS_PER_STEP, _MIN_STEPS * usual_steps)
        self._scores = np.empty(0, np.float32)

    def stages(self) -> Iterator[IndexStage]:
        """Yield the stages. A search that is cancelled ends without a final one."""
        tail = self._nearest_in_tail()
        if tail is None:
            return
        num_base = len(self._view.base)
        live = None if self._live is None else self._live[:num_base]
        wanted_shares = list(STAGE_SHARES)
        for part in self._graph.walk(
            self._query.vector,
            self._view.base.vectors,
            self._effort,
            self._wanted,
            live,
            self._query.cancelled,
        ):
            is_last = part.progress >= 1
            if self._live is not None and part.num_steps > self._max_steps and not is_last:
                yield from self._compared(part, self._live)
                return
            self._rank(np.concatenate([part.positions, tail]), part.progress)
            ends_stage = part.progress >= wanted_shares[0]
            while len(wanted_shares) > 1 and part.progress >= wanted_shares[0]:
                wanted_shares.pop(0)
            if not (ends_stage or self._search.needs_features):
                continue
            features = self._features(part)
            stops = not is_last and self._search.may_stop_at(features)
            if ends_stage or stops:
                yield self._stage(part, features, is_final=is_last or stops)
            if is_last:
                self._search.complete(features)
            if stops:
                return

    def _compared(self, part: WalkSlice, live: Mask) -> Iterator[IndexStage]:
        """Yield the final stage of a search whose walk has cost more than comparing all rows."""
        query = self._query
        positions = np.flatnonzero(live) if query.allowed is None else query.allowed
        found = self._view.best_at(positions, query.vector, query.top_k, query.cancelled)
        if found is None:
            return
        rows, scores = found
        self._scores = np.array(scores, np.float32)
        self._search.update(rows, 1.0)
        part = replace(part, progress=1.0, num_scored=part.num_scored + len(positions))
        features = self._features(part)
        yield self._stage(part, features, is_final=True)
        self._search.complete(features)

    def _nearest_in_tail(self) -> Positions | None:
        """Return the best positions of the tail. None: the search was cancelled."""
        tail, num_base = self._view.tail, len(self._view.base)
        if self._query.cancelled():
            return None
        scores = np.empty(tail.count, np.float32)
        for begin, end in blocks(tail.count, _TAIL_BLOCK):
            scores[begin:end] = tail.vectors[begin:end] @ self._query.vector
            if self._query.cancelled():
                return None
        found = np.arange(tail.count)
        if self._live is not None:
            found = found[self._live[num_base:]]
        best = np.argsort(-scores[found], kind="stable")[: self._wanted]
        return num_base + found[best]

    def _rank(self, positions: Positions, progress: float) -> None:
        scores = self._view.scores_at(positions, self._query.vector)
        rows = self._view.rows_at(positions)
        best = np.lexsort((rows, -scores))[: self._query.top_k]
        self._scores = scores[best]
        self._search.update(tuple(rows[best].tolist()), progress)

    def _features(self, part: WalkSlice) -> StageFeatures:
        is_full = len(self._scores) == self._query.top_k
        return StageFeatures(
            progress=part.progress,
            top_k=self._query.top_k,
            kth_score=float(self._scores[-1]) if is_full else NO_SCORE,
            best_score=float(self._scores[0]) if len(self._scores) else NO_SCORE,
            next_bound=_NOTHING_KNOWN,
            next_centroid_score=part.next_score,
            unchanged=self._search.unchanged_share(part.progress),
            num_changes=self._search.num_changes,
        )

    def _stage(self, part: WalkSlice, features: StageFeatures, *, is_final: bool) -> IndexStage:
        scores: Vectors = self._scores
        return IndexStage(
            rows=self._search.rows,
            scores=tuple(scores.tolist()),
            progress=part.progress,
            final=is_final,
            final_probability=1.0 if is_final else self._search.probability(features),
            num_scored=part.num_scored + self._view.tail.count,
        )
