"""Predicted seconds to load bytes from a tier (DESIGN §1): latency and bandwidth, averaged.

Seconds are taken to be latency + bytes / bandwidth. Both follow from a least-squares line through
the loads seen, in which every load counts a little less than the one after it (an exponential
average), so that they follow a disk that fills or a network that clogs.
"""

from __future__ import annotations

DECAY = 0.98
"""Weight of a load against the one after it: some fifty loads count."""

PRIOR_WEIGHT = 2.0
"""How many loads the first guess is worth."""


class LoadModel:
    """Loads from one tier. Not safe to share between threads.

    latency_s, bytes_per_s: the first guess, which fades as loads are seen.
    """

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        if latency_s <= 0 or bytes_per_s <= 0:
            raise ValueError("latency and bandwidth are greater than 0")
        self._least_s = latency_s / 100
        # Sums over loads of weight 1, bytes, bytes squared, seconds, and bytes times seconds.
        self._sums = [0.0] * 5
        for num_bytes in (64 << 10, 8 << 20):
            self._add(num_bytes, latency_s + num_bytes / bytes_per_s, PRIOR_WEIGHT / 2)

    def observe(self, num_bytes: int, seconds: float) -> None:
        """One load took seconds for num_bytes."""
        if num_bytes <= 0 or seconds <= 0:
            return
        self._sums = [total * DECAY for total in self._sums]
        self._add(num_bytes, seconds, 1.0)

    def predict(self, num_bytes: int) -> float:
        """Seconds that loading num_bytes is going to take; greater than 0."""
        weight, total_bytes, squares, total_s, products = self._sums
        mean_bytes, mean_s = total_bytes / weight, total_s / weight
        spread = squares / weight - mean_bytes**2
        slope = 0.0
        # Loads of one size say nothing about the others: then all of it is put down to bytes.
        if spread > (0.01 * mean_bytes) ** 2:
            slope = (products / weight - mean_bytes * mean_s) / spread
        if not 0.0 < slope <= mean_s / mean_bytes:
            slope = mean_s / mean_bytes
        return max(mean_s + slope * (num_bytes - mean_bytes), self._least_s)

    def _add(self, num_bytes: int, seconds: float, weight: float) -> None:
        size = float(num_bytes)
        terms = (1.0, size, size * size, seconds, size * seconds)
        self._sums = [total + weight * term for total, term in zip(self._sums, terms, strict=True)]
