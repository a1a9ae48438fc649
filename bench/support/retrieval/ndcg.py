"""The measure of how well a search orders its hits."""

from __future__ import annotations

import math
from collections.abc import Sequence

NDCG_DEPTH = 10


def ndcg(rows: Sequence[int], grades: dict[int, int]) -> float:
    """Return the normalized discounted cumulative gain of the first ten rows, in [0, 1].

    A row of grade g has the gain 2 ** g - 1.
    """
    ideal = _gain(sorted(grades.values(), reverse=True))
    return _gain([grades.get(row, 0) for row in rows]) / ideal if ideal else 0.0


def _gain(grades: Sequence[int]) -> float:
    return sum((2.0**grade - 1) / math.log2(i + 2) for i, grade in enumerate(grades[:NDCG_DEPTH]))
