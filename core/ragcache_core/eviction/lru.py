"""LRU: the least recently used entry is evicted first."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from ragcache_core.eviction.policy import EvictionCandidate
from ragcache_core.eviction.ranked import RankedPolicy
from ragcache_core.store_api import VariantUse

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _LastUse:
    number: int


class LeastRecentlyUsed(RankedPolicy[K, _LastUse]):
    """Ranks entries by the sequence number of their last use."""

    def _initial_state(self, key: K, candidate: EvictionCandidate[K], now: float) -> _LastUse:
        return _LastUse(self._uses)

    def _count_use(
        self, state: _LastUse, candidate: EvictionCandidate[K], now: float, use: VariantUse
    ) -> None:
        state.number = self._uses

    def _priority(self, state: _LastUse, candidate: EvictionCandidate[K]) -> float:
        return float(state.number)
