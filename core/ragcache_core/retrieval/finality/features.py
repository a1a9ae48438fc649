"""The features of a running search at a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Inputs = npt.NDArray[np.float64]

NO_SCORE: Final = -1.0


@dataclass(frozen=True, slots=True)
class StageFeatures:
    """The features of a search at a checkpoint.

    Attributes:
        progress: Finished share of the planned scan, in (0, 1].
        top_k: Wanted hits.
        kth_score: Score of the k-th best hit so far. It is -1 if there are fewer than ``top_k``.
        best_score: Score of the best hit so far, -1 without one.
        next_bound: No vector in the rest of the scan scores higher. It is -1 if nothing is left,
            and 1 if nothing is known.
        next_centroid_score: Score of the nearest centroid that is left, -1 if none is.
        unchanged: Share of the scan since the hits last changed.
        num_changes: Hits that are new since the last checkpoint.
        expected_better: Estimated number of vectors in the rest of the scan that score at least
            ``kth_score``. NaN: unknown.
        expected_found: The same estimate for the finished part of the scan. The ratio of ``top_k``
            to it tells by how much the estimates for this query err. NaN: unknown.
    """

    progress: float
    top_k: int
    kth_score: float
    best_score: float
    next_bound: float
    next_centroid_score: float
    unchanged: float
    num_changes: int
    expected_better: float = math.nan
    expected_found: float = math.nan

    @property
    def is_provably_final(self) -> bool:
        """Whether nothing that is left can change the hits."""
        return self.progress >= 1 or self.next_bound < self.kth_score


@dataclass(frozen=True, slots=True)
class Observation:
    """What became of the hits of a checkpoint.

    Attributes:
        is_final: Whether they were the final ones, in the same order.
        recall: Share of the final hits that they held, in [0, 1].
    """

    features: StageFeatures
    is_final: bool
    recall: float


History = Sequence[tuple[StageFeatures, Sequence[int]]]
"""Features and hits, best first, of the checkpoints of a search."""


def observations(history: History) -> list[Observation]:
    """Compare the checkpoints of a complete search with the last one, the end of its scan."""
    if not history:
        return []
    final = tuple(history[-1][1])
    wanted = set(final)
    return [
        Observation(
            features,
            tuple(rows) == final,
            len(wanted & set(rows)) / len(wanted) if wanted else 1.0,
        )
        for features, rows in history[:-1]
    ]


def model_inputs(features: StageFeatures) -> list[float]:
    """Return the values from which the models predict."""
    progress = features.progress
    has_all = features.kth_score > NO_SCORE
    kth = features.kth_score if has_all else 0.0
    is_estimated = not math.isnan(features.expected_better + features.expected_found)
    better = features.expected_better if is_estimated else 0.0
    corrected = better * features.top_k / (features.expected_found + 0.1) if is_estimated else 0.0
    return [
        math.log(progress + 1e-6),
        math.log(1 - progress + 1e-3),
        features.unchanged / progress,
        math.log(features.unchanged + 0.01),
        features.num_changes / features.top_k,
        kth,
        features.best_score - kth,
        features.next_centroid_score - kth,
        features.next_bound - kth,
        math.log(better + 1e-3) if is_estimated else 0.0,
        math.log(corrected + 1e-3) if is_estimated else 0.0,
        math.log(features.top_k),
        0.0 if has_all else 1.0,
        1.0 if is_estimated else 0.0,
    ]


NUM_INPUTS: Final = 14
NUM_FLAGS: Final = 2
"""The last inputs are 0 or 1."""
