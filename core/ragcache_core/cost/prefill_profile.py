"""T(cached, computed): seconds of prefill by tokens at hand and tokens computed (RAGCache §5.1).

Measured on a grid, bilinear between its points. For a fixed number of computed tokens time is
linear in those at hand, each of which every computed one looks at once, so few rows are enough.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ragcache_core.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class PrefillProfile:
    """A measured grid.

    cached, computed: tokens, strictly ascending, the first cached one 0. seconds[i][j]: of one pass
    over computed[j] tokens behind cached[i]. pass_tokens: computed in one pass at most; a longer
    prefill is several.
    """

    cached: tuple[int, ...]
    computed: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    pass_tokens: int

    def __post_init__(self) -> None:
        if not (_ascends(self.cached, 0) and self.cached[0] == 0):
            raise InvalidInput("profile.cached", "does not ascend from 0", "measure again")
        if not _ascends(self.computed, 1):
            raise InvalidInput("profile.computed", "does not ascend from 1 on", "measure again")
        whole = len(self.seconds) == len(self.cached) and all(
            len(row) == len(self.computed) and all(math.isfinite(s) and s > 0 for s in row)
            for row in self.seconds
        )
        if not whole or self.pass_tokens < 1:
            raise InvalidInput("profile.seconds", "is no grid of seconds", "measure again")

    def predict(self, cached: int, computed: int) -> float:
        """Seconds to compute so many tokens behind so many at hand, in as many passes as it takes.

        Beyond the grid its last cells go on as they are.
        """
        seconds = 0.0
        while computed > self.pass_tokens:
            seconds += self._pass_s(cached, self.pass_tokens)
            cached, computed = cached + self.pass_tokens, computed - self.pass_tokens
        return seconds + self._pass_s(cached, computed)

    def to_json(self) -> dict[str, Any]:
        """JSON object; ``from_json`` reads it back."""
        return {
            "cached": list(self.cached),
            "computed": list(self.computed),
            "seconds": [list(row) for row in self.seconds],
            "pass_tokens": self.pass_tokens,
        }

    @classmethod
    def from_json(cls, value: object) -> PrefillProfile:
        """Raises InvalidInput where it is no profile."""
        try:
            assert isinstance(value, Mapping)
            return cls(
                tuple(map(int, value["cached"])),
                tuple(map(int, value["computed"])),
                tuple(tuple(map(float, row)) for row in value["seconds"]),
                int(value["pass_tokens"]),
            )
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise InvalidInput("profile", f"is none: {error!r}", "measure again") from None

    def _pass_s(self, cached: int, computed: int) -> float:
        if computed <= 0:
            return 0.0
        row, down = _cell(self.cached, cached)
        column, right = _cell(self.computed, computed)

        def at(index: int) -> float:
            times = self.seconds[index]
            if column + 1 == len(times):  # one size: then all of it is put down to size
                return times[column] * computed / self.computed[column]
            return times[column] + right * (times[column + 1] - times[column])

        seconds = at(row)
        if row + 1 < len(self.seconds):
            seconds += down * (at(row + 1) - seconds)
        # Noise may bend the last cell down; no pass is quicker than the quickest there was.
        return max(seconds, min(map(min, self.seconds)))


def _ascends(points: Sequence[int], least: int) -> bool:
    return bool(points) and points[0] >= least and all(a < b for a, b in pairwise(points))


def _cell(points: Sequence[int], at: int) -> tuple[int, float]:
    """Index of the grid's cell, and how far into it; below 0 or above 1 beyond the grid."""
    index = min(max(bisect_right(points, at) - 1, 0), max(0, len(points) - 2))
    if len(points) == 1:
        return 0, 0.0
    low, high = points[index], points[index + 1]
    return index, (at - low) / (high - low)
