"""Chooses how the legs of a collection's searches are combined, on questions with known answers.

The choice must not make searches worse than the better leg alone. It keeps the default as long as
no other weight is better by more than the questions' noise. It takes a leg alone if that is what
the questions show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ragcache_core.retrieval.fusion import (
    DEFAULT_LEXICAL_WEIGHT,
    Candidates,
    FusionWeights,
    best_order,
    fused_scores,
)

NDCG_DEPTH = 10
WEIGHTS = tuple(i / 20 for i in range(21))
MIN_QUESTIONS = 20
"""With fewer questions the defaults stay."""
NOISE_ERRORS = 2.0
"""Standard errors up to which a difference counts as noise."""
MIN_RANKER_ERRORS = 1.0
"""Least gain of the ranker over the fused order, in standard errors."""

Scores = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class JudgedSearch:
    """The candidates of a question, and the rows that answer it.

    ``grades`` are above 0; a higher one answers better. Rows that no leg has found count, too.
    """

    candidates: Candidates
    grades: dict[int, int]


def ndcg(rows: Sequence[int], grades: dict[int, int]) -> float:
    """Return the normalized discounted cumulative gain of the first ten rows, in [0, 1].

    A row of grade g has the gain 2 ** g - 1.
    """
    ideal = _gain(sorted(grades.values(), reverse=True))
    return _gain([grades.get(row, 0) for row in rows]) / ideal if ideal else 0.0


def choose_weights(searches: Sequence[JudgedSearch], dense_floor: float) -> FusionWeights:
    """Return the weights for a collection.

    Among the weights whose nDCG differs from the best one by no more than noise, it returns the one
    next to the default.

    Args:
        dense_floor: See FusionWeights.
    """
    if len(searches) < MIN_QUESTIONS:
        return FusionWeights(dense_floor=dense_floor)
    quality = np.array(
        [
            [_quality(search, FusionWeights(weight, dense_floor)) for weight in WEIGHTS]
            for search in searches
        ]
    )
    best = int(quality.mean(axis=0).argmax())
    behind = quality[:, [best]] - quality
    errors = behind.std(axis=0, ddof=1) / math.sqrt(len(searches))
    is_equal = behind.mean(axis=0) <= NOISE_ERRORS * errors
    distance = np.abs(np.array(WEIGHTS) - DEFAULT_LEXICAL_WEIGHT)
    chosen = int(np.argmin(np.where(is_equal, distance, np.inf)))
    return FusionWeights(WEIGHTS[chosen], dense_floor, num_questions=len(searches))


def ranker_helps(fused: Sequence[float], ranked: Sequence[float]) -> bool:
    """Return whether a ranker improves on the fused order beyond the questions' noise.

    Args:
        fused: nDCG of each question in the fused order.
        ranked: nDCG of the same questions in the ranker's order.
    """
    if len(fused) < MIN_QUESTIONS:
        return False
    gains = np.array(ranked) - np.array(fused)
    error = gains.std(ddof=1) / math.sqrt(len(gains))
    return bool(gains.mean() > MIN_RANKER_ERRORS * error)


def _quality(search: JudgedSearch, weights: FusionWeights) -> float:
    scores = fused_scores(search.candidates, weights)
    order = best_order(scores, search.candidates)[:NDCG_DEPTH]
    return ndcg(search.candidates.rows[order].tolist(), search.grades)


def _gain(grades: Sequence[int]) -> float:
    return sum((2.0**grade - 1) / math.log2(i + 2) for i, grade in enumerate(grades[:NDCG_DEPTH]))
