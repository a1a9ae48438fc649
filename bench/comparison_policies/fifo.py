"""FIFO: the entry that was added first is evicted first, regardless of its uses."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from ragcache_core.eviction.policy import EvictionCandidate
from ragcache_core.eviction.ranked import RankedPolicy
from ragcache_core.store_api import VariantUse

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Arrival:
    number: int


class FirstInFirstOut(RankedPolicy[K, _Arrival]):
    """A replaced entry keeps its position."""

    def _initial_state(self, key: K, candidate: EvictionCandidate[K], now: float) -> _Arrival:
        return _Arrival(self._uses)

    def _count_use(
        self, state: _Arrival, candidate: EvictionCandidate[K], now: float, use: VariantUse
    ) -> None:
        return None

    def _priority(self, state: _Arrival, candidate: EvictionCandidate[K]) -> float:
        return float(state.number)
