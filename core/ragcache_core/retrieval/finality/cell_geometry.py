"""How many vectors of a cell score above a threshold, estimated without reading them.

A vector of a cell is its part along the centroid and a residual. The score of a query is the sum of
both parts' scores. Over the vectors of a cell it is nearly normally distributed. Its mean is the
centroid's score times the mean cosine of the cell. Its variance is that of the residuals, which
point into a limited number of directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]

_SMALLEST_DEVIATION: Final = 1e-4
_COEFFICIENTS: Final = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
_ARGUMENT: Final = 0.3275911


@dataclass(frozen=True, slots=True)
class CellShapes:
    """The distribution of vectors around the centroids of cells, arrays of shape (cells,).

    Attributes:
        sizes: Vectors of each cell.
        mean_cosines: Mean cosine of a cell's vectors with its centroid.
        cosine_variances: Variance of these cosines.
        alignments: Mean squared cosine of two residuals of a cell. It is 1 over the number of
            directions if all are alike.
    """

    sizes: npt.NDArray[np.int64]
    mean_cosines: Floats
    cosine_variances: Floats
    alignments: Floats

    def of(self, cells: npt.NDArray[np.int64]) -> CellShapes:
        """Return the shapes of some cells, in their order."""
        return CellShapes(
            self.sizes[cells],
            self.mean_cosines[cells],
            self.cosine_variances[cells],
            self.alignments[cells],
        )


def expected_above(threshold: float, centroid_scores: Floats, shapes: CellShapes) -> Floats:
    """Estimate how many vectors of each cell score at least the threshold.

    Args:
        centroid_scores: Score of the query and each centroid, shape (cells,).
    """
    scores = np.asarray(centroid_scores, np.float64)
    residual = (1 - shapes.mean_cosines**2) * np.maximum(1 - scores**2, 0) * shapes.alignments
    variances = residual + scores**2 * shapes.cosine_variances
    deviations = np.sqrt(np.maximum(variances, _SMALLEST_DEVIATION**2))
    shares = _upper_tail((threshold - scores * shapes.mean_cosines) / deviations)
    return np.asarray(shapes.sizes * shares)


def residual_alignment(vectors: Floats, centroid: Floats) -> float | None:
    """Return the mean squared cosine of two residuals. None: there are too few vectors.

    Args:
        vectors: Some vectors of a cell, shape (n, dimension).
    """
    if len(vectors) < 8:
        return None
    residuals = vectors - (vectors @ centroid)[:, np.newaxis] * centroid
    lengths = np.linalg.norm(residuals, axis=1)
    residuals = residuals[lengths > 1e-6] / lengths[lengths > 1e-6][:, np.newaxis]
    num = len(residuals)
    if num < 8:
        return None
    return float(((residuals @ residuals.T) ** 2).sum() - num) / (num * (num - 1))


def _upper_tail(values: Floats) -> Floats:
    """Return the probability that a standard normal value is larger.

    Source: Abramowitz and Stegun, formula 7.1.26.
    """
    sizes = np.abs(values) / np.sqrt(2)
    t = 1 / (1 + _ARGUMENT * sizes)
    series = np.zeros_like(t)
    for coefficient in reversed(_COEFFICIENTS):
        series = (series + coefficient) * t
    tail = series * np.exp(-sizes * sizes) / 2
    return np.where(values >= 0, tail, 1 - tail)
