"""LFU: the entry with the fewest uses is evicted first, the least recently used among equals."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from ragcache_core.eviction.policy import EvictionCandidate
from ragcache_core.eviction.ranked import RankedPolicy
from ragcache_core.store_api import VariantUse

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _UseCount:
    uses: int


class LeastFrequentlyUsed(RankedPolicy[K, _UseCount]):
    """The count of an entry restarts when it returns."""

    def _initial_state(self, key: K, candidate: EvictionCandidate[K], now: float) -> _UseCount:
        return _UseCount(1)

    def _count_use(
        self, state: _UseCount, candidate: EvictionCandidate[K], now: float, use: VariantUse
    ) -> None:
        state.uses += 1

    def _priority(self, state: _UseCount, candidate: EvictionCandidate[K]) -> float:
        return float(state.uses)
