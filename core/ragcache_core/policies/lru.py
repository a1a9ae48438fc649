"""LRU: what was used longest ago goes first."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

from ragcache_core.policies.policy import Candidate
from ragcache_core.policies.ranked import RankedPolicy

K = TypeVar("K", bound=Hashable)


class LeastRecentlyUsed(RankedPolicy[K, None]):
    """All ranks by the number of the last use, which RankedPolicy keeps to break ties."""

    def _first(self, key: K, candidate: Candidate[K], now: float) -> None:
        return None

    def _again(self, state: None, candidate: Candidate[K], now: float, fix_overhead: float) -> None:
        return None

    def _worth(self, state: None, candidate: Candidate[K]) -> float:
        return float(self._uses)
