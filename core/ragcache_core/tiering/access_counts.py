"""How often each variant is read, lately."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class DecayedCounts(Generic[K]):
    """Counts of accesses, each of which weighs half as much after half_life_s.

    HA-RAG counts over a whole trial run (§II-A); online, what was hot must be able to cool. The
    decay is worked out where a count is looked at, so that an access costs O(1) and no sweep runs.
    """

    def __init__(self, half_life_s: float) -> None:
        if half_life_s <= 0:
            raise ValueError("half_life_s is above 0")
        self.half_life_s = half_life_s
        self._counts: dict[K, tuple[float, float]] = {}  # key: (count, as of)

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, key: K, now: float, times: float = 1.0) -> None:
        """Note accesses of key at now, in seconds of any clock that does not run backwards."""
        self._counts[key] = (self.count(key, now) + times, now)

    def count(self, key: K, now: float) -> float:
        """The accesses of key as they weigh at now; 0 for one that was never seen."""
        count, since = self._counts.get(key, (0.0, now))
        return count * float(0.5 ** ((now - since) / self.half_life_s))

    def keep(self, held: Callable[[K], bool]) -> None:
        """Forget every key that is not held any more."""
        self._counts = {key: count for key, count in self._counts.items() if held(key)}
