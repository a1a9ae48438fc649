"""Prefill profile: T(cached, computed), seconds by cached tokens and computed tokens.

It is measured on a grid and interpolated bilinearly. For a fixed number of computed tokens the time
is linear in the cached ones, because each computed token attends to each cached one. So few rows
are enough.

Source: RAGCache section 5.1.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ragcache_core.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class PrefillProfile:
    """A measured grid.

    Attributes:
        cached: Numbers of tokens, strictly ascending from 0.
        computed: Numbers of tokens, strictly ascending.
        seconds: seconds[i][j] is the time of one pass over computed[j] tokens after cached[i].
        pass_tokens: Most tokens that one pass computes. A longer prefill takes several passes.
    """

    cached: tuple[int, ...]
    computed: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    pass_tokens: int
    _fastest_s: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (_ascends(self.cached, 0) and self.cached[0] == 0):
            raise InvalidInput("profile.cached", "does not ascend from 0", "measure again")
        if not _ascends(self.computed, 1):
            raise InvalidInput("profile.computed", "does not ascend from 1", "measure again")
        is_grid = len(self.seconds) == len(self.cached) and all(
            len(row) == len(self.computed) and all(math.isfinite(s) and s > 0 for s in row)
            for row in self.seconds
        )
        if not is_grid or self.pass_tokens < 1:
            raise InvalidInput("profile.seconds", "is not a grid of seconds", "measure again")
        object.__setattr__(self, "_fastest_s", min(map(min, self.seconds)))

    def predict(self, cached: int, computed: int) -> float:
        """Return the seconds to compute tokens after cached ones, in as many passes as needed.

        Beyond the grid the last cells are extrapolated.
        """
        seconds = 0.0
        while computed > self.pass_tokens:
            seconds += self._pass_s(cached, self.pass_tokens)
            cached, computed = cached + self.pass_tokens, computed - self.pass_tokens
        return seconds + self._pass_s(cached, computed)

    def to_json(self) -> dict[str, Any]:
        """Return the profile as a JSON object, which ``from_json`` reads."""
        return {
            "cached": list(self.cached),
            "computed": list(self.computed),
            "seconds": [list(row) for row in self.seconds],
            "pass_tokens": self.pass_tokens,
        }

    @classmethod
    def from_json(cls, value: object) -> PrefillProfile:
        """Parse a profile.

        Raises:
            InvalidInput: The value is not a profile.
        """
        try:
            assert isinstance(value, Mapping)
            return cls(
                tuple(map(int, value["cached"])),
                tuple(map(int, value["computed"])),
                tuple(tuple(map(float, row)) for row in value["seconds"]),
                int(value["pass_tokens"]),
            )
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise InvalidInput("profile", f"is not a profile: {error!r}", "measure again") from None

    def _pass_s(self, cached: int, computed: int) -> float:
        if computed <= 0:
            return 0.0
        rows = self.seconds
        row, down = _cell(self.cached, cached)
        times = rows[row]
        if len(times) == 1:  # a single size: assume no latency
            share = computed / self.computed[0]
            seconds = times[0] * share
            if row + 1 < len(rows):
                seconds += down * (rows[row + 1][0] * share - seconds)
        else:
            column, right = _cell(self.computed, computed)
            seconds = times[column] + right * (times[column + 1] - times[column])
            if row + 1 < len(rows):
                below = rows[row + 1]
                below_s = below[column] + right * (below[column + 1] - below[column])
                seconds += down * (below_s - seconds)
        # Noise may give the last cell a negative slope. No pass is faster than the fastest one.
        return seconds if seconds > self._fastest_s else self._fastest_s


def _ascends(points: Sequence[int], first: int) -> bool:
    return bool(points) and points[0] >= first and all(a < b for a, b in pairwise(points))


def _cell(points: Sequence[int], value: int) -> tuple[int, float]:
    """Return the index of a grid cell and the position in it.

    The position is in [0, 1], below 0 before the grid and above 1 after it.
    """
    last = len(points) - 2
    if last < 0:
        return 0, 0.0
    index = bisect_right(points, value) - 1
    if index > last:
        index = last
    elif index < 0:
        index = 0
    low = points[index]
    return index, (value - low) / (points[index + 1] - low)
