"""Calibration of alpha: the least recomputation for a wanted quality (Cache-Craft §3.2, eq. 13)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

_NOISE = 1e-9  # qualities closer than this are equal


@dataclass(frozen=True, slots=True)
class CalibrationTrial:
    """One question of a validation set, answered with one alpha.

    fix_overhead: mean CFO of its chunks, weighted by their tokens: the share recomputed; in [0, 1].
    quality: of the answer against full recomputation, higher is better (ROUGE-L F1, say).
    """

    alpha: float
    fix_overhead: float
    quality: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise ValueError(f"alpha is finite and 0 or more, not {self.alpha}")
        if not 0 <= self.fix_overhead <= 1:
            raise ValueError(f"CFO lies in [0, 1], not {self.fix_overhead}")
        if not math.isfinite(self.quality):
            raise ValueError(f"quality is finite, not {self.quality}")


@dataclass(frozen=True, slots=True)
class Calibration:
    """An alpha, and the mean CFO and quality that are to be expected of it."""

    alpha: float
    fix_overhead: float
    quality: float


def calibrate(trials: Iterable[CalibrationTrial], wanted_quality: float) -> Calibration | None:
    """The least alpha whose mean quality is wanted_quality or more (eq. 13).

    trials: the questions of a validation set under a few alphas, the same questions under each.
    None: not even the highest alpha tried reaches it, so that only computing everything does.

    Eq. 13 minimises the mean CFO, which grows with alpha (eq. 12), so the least alpha has it. More
    recomputation does not make answers worse but for chance, so the means are first made to rise
    with alpha (isotonic regression, each alpha weighted by its trials): one lucky low alpha decides
    nothing. Between two alphas that were tried quality is taken to be a straight line. The paper
    finds that returns diminish (§6: 0.825, 0.896, 0.94, 0.953 for alpha 0.5, 1, 2, 3), and then a
    straight line promises too little rather than too much. Nothing is guessed below the lowest.
    """
    if not math.isfinite(wanted_quality):
        raise ValueError(f"quality is finite, not {wanted_quality}")
    points = _rising(_means(trials))
    for index, point in enumerate(points):
        if point.quality < wanted_quality - _NOISE:
            continue
        if index == 0:
            return point
        below = points[index - 1]
        # Above 0, for below is short of what is wanted by more than noise and point is not.
        share = min(1.0, (wanted_quality - below.quality) / (point.quality - below.quality))
        return Calibration(
            _between(below.alpha, point.alpha, share),
            _between(below.fix_overhead, point.fix_overhead, share),
            _between(below.quality, point.quality, share),
        )
    return None


def _between(low: float, high: float, share: float) -> float:
    return high if share == 1.0 else low + share * (high - low)


def _means(trials: Iterable[CalibrationTrial]) -> list[tuple[Calibration, int]]:
    """Mean of each alpha and the number of its trials, by alpha."""
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
