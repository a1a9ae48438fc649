"""How often each variant was read recently."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class DecayedCounts(Generic[K]):
    """Counts of accesses, each of which loses half its weight after half_life_s.

    HA-RAG counts over a whole trial run (section II-A); while serving, hot variants must be able to
    cool down. The decay is computed when a count is read, so an access takes O(1) and no sweep is
    needed.
    """

    def __init__(self, half_life_s: float) -> None:
        if half_life_s <= 0:
            raise ValueError("half_life_s must be greater than 0")
        self.half_life_s = half_life_s
        self._counts: dict[K, tuple[float, float]] = {}  # key: (count, time of the count)

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, key: K, now: float, times: float = 1.0) -> None:
        """Record accesses of key at now, in seconds of a monotonic clock."""
        self._counts[key] = (self.count(key, now) + times, now)

    def count(self, key: K, now: float) -> float:
        """Return the decayed accesses of key at now; 0 for an unknown key."""
        count, since = self._counts.get(key, (0.0, now))
        return count * float(0.5 ** ((now - since) / self.half_life_s))

    def keep(self, is_kept: Callable[[K], bool]) -> None:
        """Forget every key for which is_kept returns False."""
        self._counts = {key: count for key, count in self._counts.items() if is_kept(key)}
