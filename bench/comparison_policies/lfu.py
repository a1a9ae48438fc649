"""LFU: what was used least since it came goes first, the longest unused among equals."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from ragcache_core.eviction.policy import EvictionCandidate
from ragcache_core.eviction.ranked import RankedPolicy

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Count:
    uses: int


class LeastFrequentlyUsed(RankedPolicy[K, _Count]):
    """Counts start anew when an entry comes back."""

    def _initial_state(self, key: K, candidate: EvictionCandidate[K], now: float) -> _Count:
        return _Count(1)

    def _count_use(
        self, state: _Count, candidate: EvictionCandidate[K], now: float, fix_overhead: float
    ) -> None:
        state.uses += 1

    def _priority(self, state: _Count, candidate: EvictionCandidate[K]) -> float:
        return float(state.uses)
