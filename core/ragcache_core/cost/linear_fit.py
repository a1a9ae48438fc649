"""Exponentially weighted least-squares fit of latency over size.

Older observations count less, so the fit follows a disk that fills, a network that is congested, or
a processor that is shared.

``TierLatency`` begins with an estimate, so that the first loads are predicted, too.
"""

from __future__ import annotations

DECAY = 0.98
"""Weight of an observation relative to the next one. About fifty observations count."""


class LinearFit:
    """Seconds as a linear function of size. Not safe for use by several threads.

    Args:
        least_s: Lower bound of every prediction.
    """

    def __init__(self, least_s: float = 0.0) -> None:
        self._least_s = least_s
        # Sums of weight 1, size, size squared, seconds, and size times seconds.
        self._sums = [0.0] * 5

    @property
    def weight(self) -> float:
        """Weight of all observations, older ones counting less. At most 1 / (1 - DECAY)."""
        return self._sums[0]

    def observe(self, size: float, seconds: float) -> None:
        """Record a duration. A size or duration that is not positive is ignored."""
        if size > 0 and seconds > 0:
            self._sums = [total * DECAY for total in self._sums]
            self.add(size, seconds)

    def add(self, size: float, seconds: float, weight: float = 1.0) -> None:
        """Record a duration without reducing the weight of older ones."""
        terms = (1.0, size, size * size, seconds, size * seconds)
        self._sums = [total + weight * term for total, term in zip(self._sums, terms, strict=True)]

    def predict(self, size: float) -> float:
        """Return the predicted seconds for this size.

        Raises:
            ValueError: There is no observation yet.
        """
        at_zero_s, slope = self.fit()
        return max(at_zero_s + slope * size, self._least_s)

    def fit(self) -> tuple[float, float]:
        """Return the seconds at size 0 and the seconds per unit of size. Neither is negative.

        Raises:
            ValueError: There is no observation yet.
        """
        weight, total, squares, total_s, products = self._sums
        if not weight:
            raise ValueError("the fit has no observations yet")
        mean, mean_s = total / weight, total_s / weight
        spread = squares / weight - mean**2
        slope = 0.0
        # Observations of a single size do not determine a slope; assume no latency then.
        if spread > (0.01 * mean) ** 2:
            slope = (products / weight - mean * mean_s) / spread
        if not 0.0 < slope <= mean_s / mean:
            slope = mean_s / mean
        return max(0.0, mean_s - slope * mean), slope


PRIOR_WEIGHT = 2.0
"""Weight of the initial estimate, in loads."""


class TierLatency:
    """Latency of loads from one tier. Not safe for use by several threads.

    Args:
        latency_s: Initial estimate, whose weight decreases with each observed load.
        bytes_per_s: Initial estimate.
    """

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        if latency_s <= 0 or bytes_per_s <= 0:
            raise ValueError("latency and bandwidth must be greater than 0")
        self._fit = LinearFit(latency_s / 100)
        for num_bytes in (64 << 10, 8 << 20):
            self._fit.add(num_bytes, latency_s + num_bytes / bytes_per_s, PRIOR_WEIGHT / 2)

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Record the duration of one load."""
        self._fit.observe(num_bytes, seconds)

    def predict(self, num_bytes: int) -> float:
        """Return the predicted seconds to load num_bytes, greater than 0."""
        return self._fit.predict(num_bytes)
