"""Predicted seconds to load bytes from a tier (DESIGN §1): latency and bandwidth, averaged."""

from __future__ import annotations

from ragcache_core.cost.linear_fit import LinearFit

PRIOR_WEIGHT = 2.0
"""How many loads the first guess is worth."""


class TierLatency:
    """Loads from one tier. Not safe to share between threads.

    latency_s, bytes_per_s: the first guess, which fades as loads are seen.
    """

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        if latency_s <= 0 or bytes_per_s <= 0:
            raise ValueError("latency and bandwidth are greater than 0")
        self._line = LinearFit(latency_s / 100)
        for num_bytes in (64 << 10, 8 << 20):
            self._line.add(num_bytes, latency_s + num_bytes / bytes_per_s, PRIOR_WEIGHT / 2)

    def observe(self, num_bytes: int, seconds: float) -> None:
        """One load took seconds for num_bytes."""
        self._line.observe(num_bytes, seconds)

    def predict(self, num_bytes: int) -> float:
        """Seconds that loading num_bytes is going to take; greater than 0."""
        return self._line.predict(num_bytes)
