"""One search as its estimator sees it: hits at checkpoints, until it ends."""

from __future__ import annotations

from ragcache_core.retrieval.finality.features import StageFeatures
from ragcache_core.retrieval.finality.search_estimator import SearchEstimator


class RunningSearch:
    """Notes how the hits of a search change, and asks whether it may stop.

    Args:
        recall: The declared one. None: the search runs to its end.

    Attributes:
        rows: The hits at the latest checkpoint, best first.
        num_changes: Hits that were new at the latest checkpoint.
    """

    def __init__(self, estimator: SearchEstimator, recall: float | None) -> None:
        self.rows: tuple[int, ...] = ()
        self.num_changes = 0
        self._estimator = estimator
        self._recall = recall
        self._may_stop = recall is not None and estimator.may_stop()
        # A search that could stop and does not is harder than most, so it is not learned from.
        # One that may not stop despite a declared recall was chosen to be learned from.
        self._learns = not self._may_stop and (recall is not None or estimator.wants_history())
        self._changed_at = 0.0
        self._history: list[tuple[StageFeatures, tuple[int, ...]]] = []

    @property
    def needs_features(self) -> bool:
        """Whether each checkpoint needs features, and not only those that end a stage."""
        return self._may_stop or self._learns

    def update(self, rows: tuple[int, ...], progress: float) -> None:
        """Take the hits of the next checkpoint."""
        self.num_changes = 0
        if rows != self.rows:
            self.num_changes = len(set(rows).difference(self.rows))
            self._changed_at = progress
            self.rows = rows

    def unchanged_share(self, progress: float) -> float:
        """Return the share of the scan since the hits last changed."""
        return progress - self._changed_at

    def may_stop_at(self, features: StageFeatures) -> bool:
        """Return whether the search may stop at this checkpoint, which is not the last one."""
        if self._learns:
            self._history.append((features, self.rows))
        if self._recall is None or not self._may_stop:
            return False
        return self._estimator.should_stop(features, self._recall)

    def probability(self, features: StageFeatures) -> float:
        """Return the probability that the present hits are final."""
        return self._estimator.probability(features)

    def complete(self, features: StageFeatures) -> None:
        """Let the estimator learn from the complete search. The features are those of its end."""
        if self._learns:
            self._estimator.learn([*self._history, (features, self.rows)])
