"""GDSF as RAGCache measures it: the baseline of PGDSF, which ignores the cost of a prefix.

Priority = Clock + Frequency * Cost / Size (formula 2) with a cost proportional to the size, so the
fraction is 1. Frequency counts the uses since the entry was added, as in the web caches that GDSF
was designed for.

Source: RAGCache section 7.3.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from ragcache_core.eviction.policy import EvictionCandidate
from ragcache_core.eviction.ranked import RankedPolicy
from ragcache_core.store_api import VariantUse

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _ClockedUses:
    uses: int
    clock: float


class GreedyDualSizeFrequency(RankedPolicy[K, _ClockedUses]):
    """One clock, which each eviction sets to the victim's priority (formula 3)."""

    def __init__(self, *, leaves_only: bool) -> None:
        super().__init__(leaves_only=leaves_only)
        self._clock = 0.0

    def _initial_state(self, key: K, candidate: EvictionCandidate[K], now: float) -> _ClockedUses:
        return _ClockedUses(1, self._clock)

    def _count_use(
        self, state: _ClockedUses, candidate: EvictionCandidate[K], now: float, use: VariantUse
    ) -> None:
        state.uses += 1
        state.clock = self._clock

    def _priority(self, state: _ClockedUses, candidate: EvictionCandidate[K]) -> float:
        return state.clock + state.uses

    def _on_evicted(self, key: K, state: _ClockedUses, priority: float) -> None:
        self._clock = max(self._clock, priority)
