"""T(cached, uncached): seconds of prefill, interpolated bilinearly from a profile.

The profile is computed, not measured, so that replaying a trace needs no engine: operations of a 7B
model (2 per weight and token, and 4 per layer, dimension and pair in attention) at 60 TFLOP/s. Only
ratios of its figures are reported.

Source: RAGCache section 5.1.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

_WEIGHTS = 7e9
_LAYERS, _WIDTH = 32, 4096
_OPERATIONS_PER_S = 60e12
_GRID = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)


def _profiled(cached: float, uncached: float) -> float:
    pairs = uncached * cached + uncached * uncached / 2
    return (2 * _WEIGHTS * uncached + 4 * _LAYERS * _WIDTH * pairs) / _OPERATIONS_PER_S


class ComputedProfile:
    """Seconds at the points of a grid, interpolated between them."""

    def __init__(self) -> None:
        self._times = [[_profiled(cached, uncached) for uncached in _GRID] for cached in _GRID]
        self.seconds = lru_cache(maxsize=100_000)(self._seconds)

    def _seconds(self, cached: int, uncached: int) -> float:
        """Return T(cached, uncached), both in tokens."""
        row, down = _cell(cached)
        column, right = _cell(uncached)
        times = self._times
        near = times[row][column] * (1 - right) + times[row][column + 1] * right
        far = times[row + 1][column] * (1 - right) + times[row + 1][column + 1] * right
        return near * (1 - down) + far * down


def _cell(num_tokens: int) -> tuple[int, float]:
    """Return the index of the grid's cell and the fraction within it."""
    index = min(bisect_right(_GRID, num_tokens) - 1, len(_GRID) - 2)
    low, high = _GRID[index], _GRID[index + 1]
    return index, (num_tokens - low) / (high - low)
