"""Stops a search for a declared recall, so that the mean recall of searches reaches it.

A search stops when its expected recall reaches a threshold. The threshold comes from complete
searches: they are replayed with each threshold, and the lowest one is taken whose mean recall
reaches the target. It therefore holds a margin for the errors of the estimates, which is learned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MIN_SEARCHES: Final = 32
"""Complete searches before the first one may stop early."""

EXPLORATION: Final = 32
"""One search in so many runs to the end, so that learning goes on."""

_THRESHOLDS: Final = np.concatenate([np.linspace(0.3, 0.9, 61), np.linspace(0.905, 1.0, 39)])
_MARGIN_ERRORS: Final = 1.0
"""The mean recall has to exceed the target by so many of its standard errors."""


@dataclass(frozen=True, slots=True)
class StoppingCurve:
    """Mean recall of searches that stop at a threshold of their expected recall.

    Attributes:
        lower_means: Mean recall at each threshold less a margin for the small number of searches.
        num_searches: Replayed searches.
    """

    lower_means: tuple[float, ...]
    num_searches: int

    def threshold(self, recall: float) -> float | None:
        """Return the lowest expected recall at which searches may stop.

        None: searches have to finish, because too few have been replayed or none would reach it.
        """
        if self.num_searches < MIN_SEARCHES or recall >= 1:
            return None
        reached = np.flatnonzero(np.array(self.lower_means) < recall)
        first = int(reached[-1]) + 1 if len(reached) else 0
        return float(_THRESHOLDS[first]) if first < len(_THRESHOLDS) else None


NO_CURVE: Final = StoppingCurve((0.0,) * len(_THRESHOLDS), 0)


def replay(searches: Sequence[tuple[Floats, Floats]]) -> StoppingCurve:
    """Replay complete searches with each threshold.

    Args:
        searches: Expected and actual recall at the checkpoints of each search before its end.
    """
    if not searches:
        return NO_CURVE
    recalls = np.ones((len(searches), len(_THRESHOLDS)))
    for i, (expected, actual) in enumerate(searches):
        reached = np.searchsorted(np.maximum.accumulate(expected), _THRESHOLDS)
        recalls[i] = np.concatenate([actual, [1.0]])[reached]
    errors = recalls.std(axis=0) / math.sqrt(len(searches))
    # A search that nearly always succeeds seems to have no error; one failure more would show it.
    errors = np.maximum(errors, 1 / (4 * len(searches)))
    lower = recalls.mean(axis=0) - _MARGIN_ERRORS * errors
    return StoppingCurve(tuple(lower.tolist()), len(searches))
