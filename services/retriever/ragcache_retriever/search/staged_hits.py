"""Joins what the parts of one search have found, and tells how likely it is final.

Source: RAGCache section 5.3.
"""

from __future__ import annotations

from collections.abc import Iterable

from ragcache_core.retrieval.stage_counts import StageCounts
from ragcache_retriever.search.vector_index import IndexStage

STAGE_SHARES = (1 / 8, 1 / 2, 1.0)
"""Share of the effort at the end of each stage. After 13 % of the scan, 95 % of searches have their
final hits (RAGCache Fig. 8)."""


class StagedHits:
    """The best hits of one search so far.

    Args:
        counts: Of the stages of past searches of the index.
        recall: Stop at the first stage that had this share of the final hits in past searches.
            None: finish.
    """

    def __init__(self, counts: StageCounts, top_k: int, recall: float | None) -> None:
        self._counts = counts
        self._top_k = top_k
        self._recall = recall if recall is not None and counts.may_stop() else None
        self._best: dict[int, float] = {}
        self._stages: list[tuple[float, tuple[int, ...]]] = []

    def stage(
        self,
        found: Iterable[tuple[int, float]],
        progress: float,
        num_scored: int,
        *,
        is_last: bool,
    ) -> IndexStage:
        """Add rows with their scores, and return the stage that they end."""
        joined = self._best | dict(found)
        self._best = dict(sorted(joined.items(), key=lambda hit: (-hit[1], hit[0]))[: self._top_k])
        rows, scores = tuple(self._best), tuple(self._best.values())
        probability, stops = 1.0, False
        if is_last:
            self._counts.learn(self._stages, rows)
        else:
            self._stages.append((progress, rows))
            stops = self._recall is not None and self._counts.has_recall(progress, self._recall)
            probability = 1.0 if stops else self._counts.probability(progress)
        return IndexStage(rows, scores, progress, is_last or stops, probability, num_scored)


def slices(num_items: int) -> list[tuple[int, int]]:
    """Return the first and the end of each stage's part of items, none of them empty.

    Without items there is one empty part.
    """
    ends = sorted({min(num_items, max(1, round(share * num_items))) for share in STAGE_SHARES})
    return list(zip([0, *ends[:-1]], ends, strict=True))
