"""How far claimed probabilities are from what happened."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_NUM_BINS = 10

Claims = Sequence[tuple[float, bool]]
"""Pairs of a claimed probability and whether the event happened."""


def calibration_error(claims: Claims) -> float:
    """Return the expected calibration error over bins of equal width."""
    error = sum(share * abs(claimed - happened) for claimed, happened, share in curve(claims))
    return round(error, 4)


def curve(claims: Claims) -> list[tuple[float, float, float]]:
    """Return for each bin that has claims their mean, the share that happened, and their share."""
    claimed, happened = np.array(claims, np.float64).T
    bins = np.minimum((claimed * _NUM_BINS).astype(int), _NUM_BINS - 1)
    return [
        (float(claimed[bins == i].mean()), float(happened[bins == i].mean()), float(share))
        for i in range(_NUM_BINS)
        if (share := (bins == i).mean()) > 0
    ]
