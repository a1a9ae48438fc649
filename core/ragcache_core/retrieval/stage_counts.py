"""How likely the hits of a stage are final, counted from past searches of the same collection.

Source: RAGCache section 5.3 starts a generation with hits that may change. In its Fig. 8, 95 % of
searches have their final hits after 13 % of the scan. Here each collection counts its own share.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

PRIOR_SEARCHES: Final = 2.0
"""Searches that the prior counts as. Half of them had the final hits."""
MAX_SEARCHES: Final = 1000.0
"""Searches up to which all count alike. Then counts are halved, so that later ones count more."""
MIN_SEARCHES: Final = 32
"""Complete searches before one may stop early for its declared recall."""
EXPLORATION: Final = 32
"""One search with a declared recall in so many runs to its end, so that counting goes on."""
NUM_BINS: Final = 8
"""Stages whose progress is in the same one of so many parts are counted together."""


class StageCounts:
    """Counts of the stages of past searches. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_searches = [0.0] * NUM_BINS
        self._num_final = [0.0] * NUM_BINS
        self._recalls = [0.0] * NUM_BINS
        self._num_declared = 0

    def probability(self, progress: float) -> float:
        """Return the share of past searches whose hits did not change after such a stage.

        Args:
            progress: Finished share of the search, in [0, 1).
        """
        i = _bin(progress)
        with self._lock:
            return (PRIOR_SEARCHES / 2 + self._num_final[i]) / (
                PRIOR_SEARCHES + self._num_searches[i]
            )

    def may_stop(self) -> bool:
        """Note a search with a declared recall, and return whether it may stop for it."""
        with self._lock:
            self._num_declared += 1
            return self._num_declared % EXPLORATION > 0

    def has_recall(self, progress: float, recall: float) -> bool:
        """Return whether the mean recall of such stages is at least this one, in enough searches.

        Searches of the prior have found none, which is a margin for the error of the mean.
        """
        i = _bin(progress)
        with self._lock:
            num_searches = self._num_searches[i]
            if num_searches < MIN_SEARCHES:
                return False
            return self._recalls[i] >= recall * (PRIOR_SEARCHES + num_searches)

    def learn(
        self, stages: Sequence[tuple[float, tuple[int, ...]]], final: tuple[int, ...]
    ) -> None:
        """Count a search that has run to its end.

        Whether a search stops depends on these counts alone and not on its hits. So the ones that
        run to their end are like all others.

        Args:
            stages: Progress and hits of the stages before the last one.
            final: Hits of the last stage.
        """
        wanted = set(final)
        by_bin = {_bin(progress): hits for progress, hits in stages}  # the latest one of each bin
        with self._lock:
            for i, hits in by_bin.items():
                self._num_searches[i] += 1
                self._num_final[i] += hits == final
                self._recalls[i] += len(wanted.intersection(hits)) / len(wanted) if wanted else 1
                if self._num_searches[i] > MAX_SEARCHES:
                    for counts in (self._num_searches, self._num_final, self._recalls):
                        counts[i] /= 2


def _bin(progress: float) -> int:
    return min(int(progress * NUM_BINS), NUM_BINS - 1)
