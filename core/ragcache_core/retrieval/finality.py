"""Whether the hits of a running search are the final ones."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageFeatures:
    """What is known of a search at a checkpoint.

    Attributes:
        progress: Finished share of the planned scan, in (0, 1].
        top_k: Wanted hits.
        kth_score: Score of the k-th best hit so far. It is -1 if there are fewer than ``top_k``.
        best_score: Score of the best hit so far, -1 without one.
        next_bound: Upper bound of the scores that the rest of the scan can find, -1 if nothing is
            left.
        next_centroid_score: Score of the nearest centroid that is left, -1 if none is.
        unchanged: Share of the scan since the hits last changed.
        num_changes: Hits that are new since the last checkpoint.
        expected_better: Estimated number of vectors in the rest of the scan that score higher than
            ``kth_score``, see ``expected_better``. NaN: unknown.
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
