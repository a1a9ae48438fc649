"""Logistic regression with a prior, and recalibration of its predictions by bins."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

NUM_BINS: Final = 16

_MAX_ROUNDS: Final = 20
_LARGEST_LOGIT: Final = 30.0
_BIN_PRIOR: Final = 64.0
"""A bin of so many observations is half trusted."""


def logistic(logits: Floats) -> Floats:
    """Return probabilities for logits."""
    return np.asarray(1 / (1 + np.exp(-np.clip(logits, -_LARGEST_LOGIT, _LARGEST_LOGIT))))


def logistic_of(logit: float) -> float:
    """Return the probability for one logit."""
    return 1 / (1 + math.exp(-min(max(logit, -_LARGEST_LOGIT), _LARGEST_LOGIT)))


def fit(inputs: Floats, targets: Floats, prior: Floats, strength: float) -> Floats:
    """Return weights of a logistic regression by Newton's method.

    Args:
        inputs: Shape (n, weights).
        targets: In [0, 1], shape (n,).
        prior: Weights to stay near to.
        strength: Penalty of the squared distance from the prior.
    """
    weights = prior.copy()
    loss = _loss(weights, inputs, targets, prior, strength)
    for _ in range(_MAX_ROUNDS):
        predicted = logistic(inputs @ weights)
        gradient = inputs.T @ (targets - predicted) - strength * (weights - prior)
        curvature = predicted * (1 - predicted)
        hessian = (inputs * curvature[:, np.newaxis]).T @ inputs
        step = np.linalg.solve(hessian + strength * np.eye(len(prior)), gradient)
        share = 1.0
        while share > 1e-4:
            candidate = weights + share * step
            candidate_loss = _loss(candidate, inputs, targets, prior, strength)
            if candidate_loss < loss:
                break
            share /= 2
        else:
            return weights
        gain, weights, loss = loss - candidate_loss, candidate, candidate_loss
        if gain < 1e-6 * max(1.0, abs(loss)):
            return weights
    return weights


def _loss(
    weights: Floats, inputs: Floats, targets: Floats, prior: Floats, strength: float
) -> float:
    logits = np.clip(inputs @ weights, -_LARGEST_LOGIT, _LARGEST_LOGIT)
    losses = np.logaddexp(0, logits) - targets * logits
    return float(losses.sum() + strength / 2 * ((weights - prior) ** 2).sum())


@dataclass(frozen=True, slots=True)
class BinCalibration:
    """Corrections of predictions, by bins of equal width.

    Attributes:
        corrections: Observed mean less predicted mean of each bin, less if a bin has few
            observations.
    """

    corrections: tuple[float, ...] = (0.0,) * NUM_BINS

    @classmethod
    def of(cls, predicted: Floats, observed: Floats) -> BinCalibration:
        """Compare predictions with what was observed."""
        bins = np.minimum((predicted * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        excess = np.bincount(bins, weights=observed - predicted, minlength=NUM_BINS)
        counts = np.bincount(bins, minlength=NUM_BINS)
        return cls(tuple((excess / (counts + _BIN_PRIOR)).tolist()))

    def apply(self, predicted: float) -> float:
        """Return the corrected prediction, between the corrections of the two nearest bins."""
        position = predicted * NUM_BINS - 0.5
        low = min(max(math.floor(position), 0), NUM_BINS - 2)
        share = min(max(position - low, 0.0), 1.0)
        correction = (1 - share) * self.corrections[low] + share * self.corrections[low + 1]
        return min(max(predicted + correction, 0.0), 1.0)

    def apply_all(self, predicted: Floats) -> Floats:
        """Return corrected predictions, shape (n,)."""
        centres = (np.arange(NUM_BINS) + 0.5) / NUM_BINS
        corrections = np.interp(predicted, centres, np.array(self.corrections))
        return np.asarray(np.clip(predicted + corrections, 0, 1))
