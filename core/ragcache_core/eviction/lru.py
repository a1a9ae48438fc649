"""LRU: what was used longest ago goes first."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from ragcache_core.eviction.policy import Candidate
from ragcache_core.eviction.ranked import RankedPolicy

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _LastUse:
    number: int


class LeastRecentlyUsed(RankedPolicy[K, _LastUse]):
    """All ranks by the number of the last use."""

    def _first(self, key: K, candidate: Candidate[K], now: float) -> _LastUse:
        return _LastUse(self._uses)

    def _again(
        self, state: _LastUse, candidate: Candidate[K], now: float, fix_overhead: float
    ) -> None:
        state.number = self._uses

    def _worth(self, state: _LastUse, candidate: Candidate[K]) -> float:
        return float(state.number)
