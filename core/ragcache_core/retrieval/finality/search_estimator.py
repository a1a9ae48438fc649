"""What an index asks during its searches: how likely the hits are final, and whether to stop."""

from __future__ import annotations

import threading
from typing import Final

from ragcache_core.retrieval.finality.estimator import WINDOW_SEARCHES, FinalityEstimator
from ragcache_core.retrieval.finality.features import History, StageFeatures, observations
from ragcache_core.retrieval.finality.recall_stopping import EXPLORATION, MIN_SEARCHES

_ALL_LEARNED: Final = WINDOW_SEARCHES
_LEARNED_STEP: Final = 16


class SearchEstimator:
    """Learns from complete searches of one index. Any thread may call it.

    Readers use the latest state without a lock, because states never change.
    """

    def __init__(self, state: FinalityEstimator | None = None) -> None:
        self._state = state or FinalityEstimator()
        self._lock = threading.Lock()  # of the count, and of writers of the state
        self._num_declared = 0
        self._num_offered = 0

    def probability(self, features: StageFeatures) -> float:
        """Return the calibrated probability that the hits are final, in the same order."""
        return self._state.probability(features)

    def expected_recall(self, features: StageFeatures) -> float:
        """Return the expected share of the final hits that are found."""
        return self._state.expected_recall(features)

    def may_stop(self) -> bool:
        """Return whether the search that begins may stop for its declared recall.

        The first searches and then one in 32 run to the end, so that the estimator learns.
        """
        with self._lock:
            self._num_declared += 1
            explores = self._num_declared % EXPLORATION == 0
        return not explores and self._state.curve.num_searches >= MIN_SEARCHES

    def wants_history(self) -> bool:
        """Return whether to learn from the complete search that begins.

        It counts: the first searches, and then one in 16, because learning costs as much as a scan
        of 100,000 vectors.
        """
        with self._lock:
            self._num_offered += 1
            return self._num_offered <= _ALL_LEARNED or self._num_offered % _LEARNED_STEP == 0

    def should_stop(self, features: StageFeatures, recall: float) -> bool:
        """Return whether a search with a declared recall may stop at this checkpoint."""
        return self._state.may_stop_at(features, recall)

    def learn(self, history: History) -> None:
        """Learn from a complete search.

        Call it for each complete search that could not have stopped. A search that could and did
        not is harder than most, so that learning from it would bias the estimates.

        Args:
            history: The last one is the end of the scan.
        """
        seen = observations(history)
        with self._lock:
            self._state = self._state.learn(seen)

    def to_json(self) -> str:
        """Return the learned state as text."""
        return self._state.to_json()

    @classmethod
    def from_json(cls, text: str) -> SearchEstimator:
        """Return an estimator with a learned state. Raises ValueError if the text is not one."""
        return cls(FinalityEstimator.from_json(text))
