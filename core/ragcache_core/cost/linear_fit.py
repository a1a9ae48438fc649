"""Seconds by size, as a line through what was seen.

Least squares, in which everything seen counts a little less than what came after it (an exponential
average), so that the line follows a disk that fills, a network that clogs, a processor that is
shared.
"""

from __future__ import annotations

DECAY = 0.98
"""Weight of one observation against the next: some fifty count."""


class LinearFit:
    """Not safe to share between threads. least_s: no prediction is below it."""

    def __init__(self, least_s: float = 0.0) -> None:
        self._least_s = least_s
        # Sums of weight 1, size, size squared, seconds, and size times seconds.
        self._sums = [0.0] * 5

    @property
    def weight(self) -> float:
        """How many observations there are, old ones counting less; at most 1 / (1 - DECAY)."""
        return self._sums[0]

    def observe(self, size: float, seconds: float) -> None:
        """Something of this size took so many seconds; what makes no sense is left out."""
        if size > 0 and seconds > 0:
            self._sums = [total * DECAY for total in self._sums]
            self.add(size, seconds)

    def add(self, size: float, seconds: float, weight: float = 1.0) -> None:
        """The same without making anything older."""
        terms = (1.0, size, size * size, seconds, size * seconds)
        self._sums = [total + weight * term for total, term in zip(self._sums, terms, strict=True)]

    def predict(self, size: float) -> float:
        """Seconds for this size. Raises ValueError before anything was seen."""
        at_zero_s, slope = self.fit()
        return max(at_zero_s + slope * size, self._least_s)

    def fit(self) -> tuple[float, float]:
        """Seconds at size 0, and seconds that each unit of size takes more; neither is below 0.

        Raises ValueError before anything was seen.
        """
        weight, total, squares, total_s, products = self._sums
        if not weight:
            raise ValueError("nothing was seen yet")
        mean, mean_s = total / weight, total_s / weight
        spread = squares / weight - mean**2
        slope = 0.0
        # What is of one size says nothing about others: then all of it is put down to size.
        if spread > (0.01 * mean) ** 2:
            slope = (products / weight - mean * mean_s) / spread
        if not 0.0 < slope <= mean_s / mean:
            slope = mean_s / mean
        return max(0.0, mean_s - slope * mean), slope
