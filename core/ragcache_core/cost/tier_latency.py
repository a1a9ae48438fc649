"""Predicted seconds to load bytes from one tier."""

from __future__ import annotations

from ragcache_core.cost.linear_fit import LinearFit

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
