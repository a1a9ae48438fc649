"""GDSF as RAGCache measures it (§7.3): PGDSF's opponent, blind to what a prefix costs.

Priority = Clock + Frequency * Cost / Size (formula 2) with a cost proportional to the size, so that
the fraction is 1. Frequency counts the uses since the entry came, as in the Web caches GDSF was
made for.
"""

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
    clock: float


class GreedyDualSizeFrequency(RankedPolicy[K, _Count]):
    """One clock, which every eviction sets to the victim's priority (formula 3)."""

    def __init__(self, *, leaves_only: bool) -> None:
        super().__init__(leaves_only=leaves_only)
        self._clock = 0.0

    def _initial_state(self, key: K, candidate: EvictionCandidate[K], now: float) -> _Count:
        return _Count(1, self._clock)

    def _count_use(
        self, state: _Count, candidate: EvictionCandidate[K], now: float, fix_overhead: float
    ) -> None:
        state.uses += 1
        state.clock = self._clock

    def _priority(self, state: _Count, candidate: EvictionCandidate[K]) -> float:
        return state.clock + state.uses

    def _on_evicted(self, key: K, state: _Count, worth: float) -> None:
        self._clock = max(self._clock, worth)
