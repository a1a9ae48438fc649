"""Calibration of alpha: the least recomputation that reaches a wanted quality (eq. 13).

Source: Cache-Craft section 3.2.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

_NOISE = 1e-9  # qualities closer than this are equal


@dataclass(frozen=True, slots=True)
class CalibrationTrial:
    """One question of a validation set, answered with one alpha.

    Attributes:
        fix_overhead: Mean CFO of its chunks, weighted by their tokens, that is, the recomputed
            share, in [0, 1].
        quality: Of the answer against full recomputation, such as ROUGE-L F1. Higher is better.
    """

    alpha: float
    fix_overhead: float
    quality: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise ValueError(f"alpha must be finite and 0 or more, not {self.alpha}")
        if not 0 <= self.fix_overhead <= 1:
            raise ValueError(f"fix_overhead must be in [0, 1], not {self.fix_overhead}")
        if not math.isfinite(self.quality):
            raise ValueError(f"quality must be finite, not {self.quality}")


@dataclass(frozen=True, slots=True)
class Calibration:
    """An alpha, with its expected mean CFO and quality."""

    alpha: float
    fix_overhead: float
    quality: float


def calibrate(trials: Iterable[CalibrationTrial], target_quality: float) -> Calibration | None:
    """Return the least alpha whose mean quality reaches target_quality (eq. 13).

    Eq. 13 minimizes the mean CFO, which grows with alpha (eq. 12), so the least alpha minimizes it.
    More recomputation makes answers worse only by chance. Therefore the means are first made
    monotonic in alpha by isotonic regression, with each alpha weighted by its trials. So one lucky
    low alpha decides nothing. Between two tested alphas the quality is interpolated linearly. The
    paper finds diminishing returns (section 6: 0.825, 0.896, 0.94, 0.953 for alpha 0.5, 1, 2, 3),
    so the interpolation is rather too low. Below the lowest tested alpha nothing is extrapolated.

    Args:
        trials: Questions of a validation set, the same ones under each of a few alphas.
        target_quality: Finite.

    Returns:
        None if not even the highest alpha reaches the quality, so that everything has to be
            computed.
    """
    if not math.isfinite(target_quality):
        raise ValueError(f"target_quality must be finite, not {target_quality}")
    points = _rising(_means(trials))
    for index, point in enumerate(points):
        if point.quality < target_quality - _NOISE:
            continue
        if index == 0:
            return point
        below = points[index - 1]
        # The denominator is positive, because only below misses the target by more than noise.
        share = min(1.0, (target_quality - below.quality) / (point.quality - below.quality))
        return Calibration(
            _between(below.alpha, point.alpha, share),
            _between(below.fix_overhead, point.fix_overhead, share),
            _between(below.quality, point.quality, share),
        )
    return None


def _between(low: float, high: float, share: float) -> float:
    return high if share == 1.0 else low + share * (high - low)


def _means(trials: Iterable[CalibrationTrial]) -> list[tuple[Calibration, int]]:
    """Return the mean and the number of trials of each alpha, ascending."""
    by_alpha: defaultdict[float, list[CalibrationTrial]] = defaultdict(list)
    for trial in trials:
        by_alpha[trial.alpha].append(trial)
    return [
        (
            Calibration(
                alpha,
                math.fsum(trial.fix_overhead for trial in group) / len(group),
                math.fsum(trial.quality for trial in group) / len(group),
            ),
            len(group),
        )
        for alpha, group in sorted(by_alpha.items())
    ]


def _rising(means: list[tuple[Calibration, int]]) -> list[Calibration]:
    """Pool neighbours whose quality falls until none does (pool adjacent violators)."""
    pools: list[tuple[float, int, list[Calibration]]] = []  # mean quality, trials, points
    for point, trials in means:
        quality, weight, members = point.quality, trials, [point]
        while pools and pools[-1][0] >= quality:
            other_quality, other_weight, others = pools.pop()
            total = other_weight + weight
            quality = (other_quality * other_weight + quality * weight) / total
            weight, members = total, others + members
        pools.append((quality, weight, members))
    return [
        Calibration(member.alpha, member.fix_overhead, quality)
        for quality, _, members in pools
        for member in members
    ]
