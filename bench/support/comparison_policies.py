"""Eviction policies to compare the product's with."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

from ragcache_core.eviction import POLICY_NAMES as PRODUCT_POLICY_NAMES
from ragcache_core.eviction import EvictionPolicy
from ragcache_core.eviction import make_policy as make_product_policy
from ragcache_core.eviction.policy import EvictionCandidate
from ragcache_core.eviction.ranked import RankedPolicy
from ragcache_core.store_api import VariantUse

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Uses:
    uses: int
    clock: float


class LeastFrequentlyUsed(RankedPolicy[K, _Uses]):
    """LFU: the entry with the fewest uses is evicted first, the least recently used among equals.

    The count of an entry restarts when it returns.
    """

    def __init__(self, *, leaves_only: bool) -> None:
        super().__init__(leaves_only=leaves_only)
        self._clock = 0.0

    def _initial_state(self, key: K, candidate: EvictionCandidate[K], now: float) -> _Uses:
        return _Uses(1, self._clock)

    def _count_use(
        self, state: _Uses, candidate: EvictionCandidate[K], now: float, use: VariantUse
    ) -> None:
        state.uses += 1
        state.clock = self._clock

    def _priority(self, state: _Uses, candidate: EvictionCandidate[K]) -> float:
        return state.clock + state.uses


class GreedyDualSizeFrequency(LeastFrequentlyUsed[K]):
    """GDSF as RAGCache measures it: the baseline of PGDSF, which ignores the cost of a prefix.

    Priority = Clock + Frequency * Cost / Size (formula 2) with a cost proportional to the size, so
    the fraction is 1. Each eviction sets the clock to the victim's priority (formula 3).

    Source: RAGCache section 7.3.
    """

    def _on_evicted(self, key: K, state: _Uses, priority: float) -> None:
        self._clock = max(self._clock, priority)


_COMPARED = {"gdsf": GreedyDualSizeFrequency, "lfu": LeastFrequentlyUsed}
POLICY_NAMES = (*PRODUCT_POLICY_NAMES, *_COMPARED)


def make_policy(name: str, *, leaves_only: bool, **settings: float) -> EvictionPolicy[Any]:
    """Return an empty policy by its name, one of POLICY_NAMES."""
    if name in _COMPARED:
        return _COMPARED[name](leaves_only=leaves_only)
    return make_product_policy(name, leaves_only=leaves_only, **settings)
