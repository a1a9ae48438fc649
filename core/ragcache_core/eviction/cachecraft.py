"""Cache-Craft's frequency of reuse: f_r += 1 / CFO at each use; the lowest is evicted first.

CFO, the cache fix overhead, is the share of a variant's tokens that a use recomputes, so f_r grows
with what each use saves. The paper's N x M variants are one budget for all chunks and not a bound
per chunk: "from one popular chunk with N x M variants to N x M chunks, each with a single variant".
Here the budget is the capacity of the tier, and each variant is one entry.

Eq. 12 gives a CFO of 0 where the prefix matches, and 1 / 0 would fix all ranks for ever. Therefore
CFO has a lower bound (``blend.fix_overhead``).

Source: Cache-Craft section 3.3.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from ragcache_core.blend.fix_overhead import frequency_gain
from ragcache_core.eviction.policy import EvictionCandidate
from ragcache_core.eviction.ranked import RankedPolicy

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _ReuseFrequency:
    frequency: float  # f_r


class CacheCraft(RankedPolicy[K, _ReuseFrequency]):
    """Evicts the lowest frequency of reuse first.

    A new variant was computed in full (CFO 1), so it starts at 1.
    """

    def _initial_state(
        self, key: K, candidate: EvictionCandidate[K], now: float
    ) -> _ReuseFrequency:
        return _ReuseFrequency(1.0)

    def _count_use(
        self,
        state: _ReuseFrequency,
        candidate: EvictionCandidate[K],
        now: float,
        fix_overhead: float,
    ) -> None:
        state.frequency += frequency_gain(min(1.0, max(0.0, fix_overhead)))

    def _priority(self, state: _ReuseFrequency, candidate: EvictionCandidate[K]) -> float:
        return state.frequency
