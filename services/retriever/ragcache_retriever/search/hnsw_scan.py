"""One search over the graph of a view, in stages. The rows of the tail are compared first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from ragcache_core.retrieval.finality.features import NO_SCORE, StageFeatures
from ragcache_core.retrieval.finality.running_search import RunningSearch
from ragcache_core.retrieval.finality.search_estimator import SearchEstimator
from ragcache_retriever.search.cell_scan import SPARE_HITS, STAGE_SHARES, Query
from ragcache_retriever.search.files.stored_vectors import Positions, blocks
from ragcache_retriever.search.hnsw_graph import HnswGraph, WalkSlice
from ragcache_retriever.search.index_view import IndexView
from ragcache_retriever.search.vector_index import IndexStage, Vectors

_TAIL_BLOCK: Final = 4096
_NOTHING_KNOWN: Final = 1.0
"""A graph gives no bound of the scores that the rest of a walk can find."""


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
