"""Joins the results of the queries of one search, and tells how likely they are final.

A remote index says nothing of the vectors that are left. So the estimate follows from the scores
and changes of the hits alone.

Source: RAGCache section 5.3.
"""

from __future__ import annotations

from collections.abc import Iterable

from ragcache_core.retrieval.finality.features import NO_SCORE, StageFeatures
from ragcache_core.retrieval.finality.search_estimator import SearchEstimator
from ragcache_retriever.search.vector_index import IndexStage

STAGE_SHARES = (1 / 8, 1 / 2, 1.0)
"""Share of the effort at the end of each stage. After 13 % of the scan, 95 % of searches have their
final hits (RAGCache Fig. 8)."""

_NOTHING_KNOWN = 1.0


class StagedHits:
    """The best hits of one search so far.

    Args:
        estimator: Learns from complete searches of the index.
        recall: Stop as soon as this share of the final hits is expected; None: finish.
    """

    def __init__(self, estimator: SearchEstimator, top_k: int, recall: float | None) -> None:
        self._estimator = estimator
        self._top_k = top_k
        self._recall = recall if recall is not None and estimator.may_stop() else None
        self._best: dict[int, float] = {}
        self._changed_at = 0.0
        self._history: list[tuple[StageFeatures, tuple[int, ...]]] = []

    def stage(
        self,
        found: Iterable[tuple[int, float]],
        progress: float,
        num_scored: int,
        *,
        is_last: bool,
    ) -> IndexStage:
        """Add rows with their scores, and return the stage that they end."""
        before = tuple(self._best)
        joined = self._best | dict(found)
        self._best = dict(sorted(joined.items(), key=lambda hit: (-hit[1], hit[0]))[: self._top_k])
        rows, scores = tuple(self._best), tuple(self._best.values())
        if rows != before:
            self._changed_at = progress
        features = StageFeatures(
            progress=progress,
            top_k=self._top_k,
            kth_score=scores[-1] if len(scores) == self._top_k else NO_SCORE,
            best_score=scores[0] if scores else NO_SCORE,
            next_bound=NO_SCORE if is_last else _NOTHING_KNOWN,
            next_centroid_score=NO_SCORE,
            unchanged=progress - self._changed_at,
            num_changes=len(set(rows) - set(before)),
        )
        self._history.append((features, rows))
        if is_last and self._recall is None:
            self._estimator.learn(self._history)
        stops = self._recall is not None and self._estimator.should_stop(features, self._recall)
        final = is_last or stops
        return IndexStage(
            rows=rows,
            scores=scores,
            progress=progress,
            final=final,
            final_probability=1.0 if final else self._estimator.probability(features),
            num_scored=num_scored,
        )


def slices(num_items: int) -> list[tuple[int, int]]:
    """Return the first and the end of each stage's part of items, none of them empty.

    Without items there is one empty part.
    """
    ends = sorted({min(num_items, max(1, round(share * num_items))) for share in STAGE_SHARES})
    return list(zip([0, *ends[:-1]], ends, strict=True))
