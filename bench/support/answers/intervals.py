"""Shares of right answers with intervals that hold for 95 % of samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from statistics import fmean
from typing import TypedDict

_Z = 1.96
_SAMPLES = 2_000


class Interval(TypedDict):
    """A figure with the bounds of its interval, and the number of questions."""

    value: float
    low: float
    high: float
    questions: int


def share(right: Sequence[bool]) -> Interval:
    """Return the share of right answers with its Wilson interval."""
    n, p = len(right), fmean(right)
    middle = (p + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n * n))
    return _interval(p, max(0.0, middle - half), min(1.0, middle + half), n)


def gain(one: Sequence[bool], other: Sequence[bool], rng: Random) -> Interval:
    """Return how much larger the first share is, over the same questions, by a bootstrap."""
    differences = [a - b for a, b in zip(one, other, strict=True)]
    n = len(differences)
    means = sorted(fmean(rng.choices(differences, k=n)) for _ in range(_SAMPLES))
    low, high = means[round(0.025 * _SAMPLES)], means[round(0.975 * _SAMPLES) - 1]
    return _interval(fmean(differences), low, high, n)


def _interval(value: float, low: float, high: float, n: int) -> Interval:
    return {"value": round(value, 4), "low": round(low, 4), "high": round(high, 4), "questions": n}
