"""Decayed saved seconds per byte, the default policy.

    score = uses**3 * 2**(-age / half_life) * reuse(depth) * cost_s / num_bytes

- uses: how often the entry was asked for, stored or not, slowly decayed. Most chunks are asked for
  once, and each further use makes the next one more likely. Chances rise faster than counts, hence
  the exponent (2 and 5 were worse on the sequences of ``bench/policies``).
- age: time since the last use. Recently used chunks come back, because conversations continue.
- half_life: the same for all entries, so all scores decay alike and their order changes at uses
  only. The heap therefore contains log2(score) without the common -now / half_life, and needs no
  new keys as time goes by.

- reuse(depth): the share of entries at this depth of the tree that were asked for again, measured
  (``ReuseByDepth``). Only where parents outlive children: there each further chunk makes a prompt
  rarer, and a deep entry is seldom asked for twice. Independent entries have no depth.

The half-life follows the traffic: it is twice the mean time between two uses of the same key. A
fixed number of seconds that suits one site is wrong for the next. The policy recomputes all ranks
when the half-life or a share of reuse has changed enough. It does so at most once in as many uses
as there are entries.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from ragcache_core.eviction.policy import EvictionCandidate
from ragcache_core.eviction.ranked import GhostEntries, RankedPolicy
from ragcache_core.eviction.reuse_by_depth import ReuseByDepth
from ragcache_core.store_api import VariantUse

K = TypeVar("K", bound=Hashable)

USES_EXPONENT = 3.0
HALF_LIFE_PER_GAP = 2.0
"""Half-life of the score, in mean times between two uses of a key."""
COUNT_HALF_LIFE = 12.0
"""Half-life of the counts of uses, in half-lives of the score."""

FIRST_HALF_LIFE_S = 300.0
"""Initial half-life, which counts as much as FIRST_GAPS measured gaps."""
FIRST_GAPS = 32
MAX_GAPS = 4096
"""Number of gaps that the mean remembers."""
HALF_LIFE_RANGE_S = (1.0, 86_400.0)
REKEY_RATIO = 1.25

UNKNOWN_COST_S_PER_TOKEN = 2e-4
"""Cost of an entry of unknown cost: about that of a 7B model."""


@dataclass(slots=True)
class _Uses:
    """Number of uses, decayed to the time of the last one.

    Attributes:
        depth: Number of entries before this one in its prompt.
        is_repeated: Whether it was used more than once.
    """

    uses: float
    last_s: float
    depth: int
    is_repeated: bool = False


class ScorePolicy(RankedPolicy[K, _Uses]):
    """Evicts the lowest score first. Remembers the uses of keys that it does not store."""

    def __init__(self, *, leaves_only: bool) -> None:
        super().__init__(leaves_only=leaves_only)
        self._ghosts: GhostEntries[K, _Uses] = GhostEntries()
        self._num_gaps = FIRST_GAPS
        self._mean_gap_s = FIRST_HALF_LIFE_S / HALF_LIFE_PER_GAP
        self._half_life_s = FIRST_HALF_LIFE_S
        self._uses_at_rekey = 0
        self._reuse = ReuseByDepth()

    @property
    def half_life_s(self) -> float:
        """The current half-life."""
        return self._half_life_s

    def priority(self, key: K, now: float) -> float:
        """Return log2 of the current score, in seconds per byte."""
        return super().priority(key, now) - now / self._half_life_s

    def prospective_priority(self, key: K, candidate: EvictionCandidate[K], now: float) -> float:
        """Return the priority that key would have if it were added now, without adding it."""
        known = self._ghosts.get(key)
        state = (
            _Uses(1.0, now, self._depth(candidate))
            if known is None
            else _Uses(self._decayed(known, now) + 1.0, now, known.depth)
        )
        return self._priority(state, candidate) - now / self._half_life_s

    def count_rejected(self, key: K, candidate: EvictionCandidate[K], now: float) -> None:
        """Count a use of a key that was computed and will not be stored."""
        state = self._ghosts.get(key)
        if state is None:
            state = self._first_use(candidate, now)
        else:
            self._use(state, now)
        self._ghosts.put(key, state, len(self))

    def _initial_state(self, key: K, candidate: EvictionCandidate[K], now: float) -> _Uses:
        state = self._ghosts.pop(key)
        if state is None:
            return self._first_use(candidate, now)
        self._use(state, now)
        return state

    def _count_use(
        self, state: _Uses, candidate: EvictionCandidate[K], now: float, use: VariantUse
    ) -> None:
        self._use(state, now)

    def _priority(self, state: _Uses, candidate: EvictionCandidate[K]) -> float:
        cost_s = candidate.cost_s or candidate.num_tokens * UNKNOWN_COST_S_PER_TOKEN
        saved_s_per_byte = math.log2(cost_s) - math.log2(candidate.num_bytes)
        return (
            USES_EXPONENT * math.log2(state.uses)
            + state.last_s / self._half_life_s
            + self._reuse.log2_share(state.depth)
            + saved_s_per_byte
        )

    def _on_evicted(self, key: K, state: _Uses, priority: float) -> None:
        self._ghosts.put(key, state, len(self))

    def _first_use(self, candidate: EvictionCandidate[K], now: float) -> _Uses:
        depth = self._depth(candidate)
        self._reuse.add_entry(depth)
        return _Uses(1.0, now, depth)

    def _depth(self, candidate: EvictionCandidate[K]) -> int:
        """Return the depth after the parent's, 0 where entries are independent."""
        parent = candidate.parent
        if parent is None or not self.leaves_only:
            return 0
        stored = self._entries.get(parent)
        known = self._ghosts.get(parent) if stored is None else stored.state
        return 1 if known is None else known.depth + 1

    def _use(self, state: _Uses, now: float) -> None:
        self._learn_gap(now - state.last_s)
        if not state.is_repeated:
            state.is_repeated = True
            self._reuse.add_reuse(state.depth)
        state.uses = self._decayed(state, now) + 1.0
        state.last_s = now

    def _decayed(self, state: _Uses, now: float) -> float:
        return float(
            state.uses * 2.0 ** (-(now - state.last_s) / (COUNT_HALF_LIFE * self._half_life_s))
        )

    def _learn_gap(self, gap_s: float) -> None:
        self._num_gaps = min(MAX_GAPS, self._num_gaps + 1)
        self._mean_gap_s += (gap_s - self._mean_gap_s) / self._num_gaps
        if self._uses - self._uses_at_rekey < len(self):
            return
        low, high = HALF_LIFE_RANGE_S
        target = min(high, max(low, HALF_LIFE_PER_GAP * self._mean_gap_s))
        ratio = target / self._half_life_s
        has_moved = ratio > REKEY_RATIO or ratio < 1 / REKEY_RATIO or self._reuse.has_moved()
        if has_moved:
            self._half_life_s = target
            self._reuse.publish()
            self._uses_at_rekey = self._uses
            self._recompute_ranks()
