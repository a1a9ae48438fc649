"""LFU: what was used least since it came goes first, the longest unused among equals."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from ragcache_core.eviction.policy import Candidate
from ragcache_core.eviction.ranked import RankedPolicy

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Count:
    uses: int


class LeastFrequentlyUsed(RankedPolicy[K, _Count]):
    """Counts start anew when an entry comes back."""

    def _first(self, key: K, candidate: Candidate[K], now: float) -> _Count:
        return _Count(1)

    def _again(
        self, state: _Count, candidate: Candidate[K], now: float, fix_overhead: float
    ) -> None:
        state.uses += 1

    def _worth(self, state: _Count, candidate: Candidate[K]) -> float:
        return float(state.uses)
