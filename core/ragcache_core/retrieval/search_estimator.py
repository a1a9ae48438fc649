"""What an index asks during its searches: how likely the hits are final, and whether to stop."""

from __future__ import annotations

from collections.abc import Sequence

from ragcache_core.retrieval.finality import StageFeatures


class SearchEstimator:
    """Learns from complete searches of one index. Any thread may call it."""

    def probability(self, features: StageFeatures) -> float:
        """Return the calibrated probability that the hits are final, in the same order."""
        raise NotImplementedError

    def may_stop(self) -> bool:
        """Return whether the search that begins may stop for its declared recall.

        It counts: one search in 32 runs to the end, so that learning goes on.
        """
        raise NotImplementedError

    def should_stop(self, features: StageFeatures, recall: float) -> bool:
        """Return whether a search with a declared recall may stop at this checkpoint."""
        raise NotImplementedError

    def learn(self, history: Sequence[tuple[StageFeatures, Sequence[int]]]) -> None:
        """Learn from a complete search.

        Call it for each complete search that could not have stopped. A search that could and did
        not is harder than most, so that learning from it would bias the estimates.

        Args:
            history: Features and hits of each checkpoint. The last one is the end of the scan.
        """
        raise NotImplementedError

    def to_json(self) -> str:
        """Return the learned state as text."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, text: str) -> SearchEstimator:
        """Return an estimator with a learned state. Raises ValueError if the text is not one."""
        raise NotImplementedError
