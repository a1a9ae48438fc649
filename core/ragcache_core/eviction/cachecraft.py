"""Cache-Craft's frequency of reuse: f_r += 1 / CFO at each use; the lowest is evicted first.

CFO, the cache fix overhead, tells how much of a variant a use has to recompute, so f_r grows with
what each use saves. Section 3.3 defines it as CCI * (1 - beta'). The alpha of eq. 12 would scale
all uses alike, and above 1 it would make most of them equal. Engines send the CFO of each use. It
is 0 where the prefix matches.

The paper's N x M variants are one budget for all chunks and not a bound per chunk. It allows "one
popular chunk with N x M variants" and "N x M chunks, each with a single variant". Here the budget
is the capacity of the tier, and each variant is one entry.

1 / 0 would fix all ranks for ever, so CFO has a lower bound (``blend.fix_overhead``).

Source: Cache-Craft section 3.3.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from ragcache_core.blend.fix_overhead import frequency_gain
from ragcache_core.eviction.policy import EvictionCandidate
from ragcache_core.eviction.ranked import RankedPolicy
from ragcache_core.store_api import VariantUse

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
        use: VariantUse,
    ) -> None:
        state.frequency += frequency_gain(use.fix_overhead)

    def _priority(self, state: _ReuseFrequency, candidate: EvictionCandidate[K]) -> float:
        return state.frequency
