"""PGDSF, RAGCache's prefix-aware replacement policy.

Priority = Clock + Frequency * Cost / Size, where

- Clock belongs to the tier (one policy object each) and rises to the priority of each victim. An
  entry gets its clock and priority when it is retrieved.
- Frequency counts retrievals in a time window, across the entry's stays in the tier.
- Cost / Size is the mean, over the requests that computed the entry, of T(cached, computed) /
  computed: the seconds of a request's prefill, divided by the tokens that it computed. T is the
  engine's prefill profile (``cost.prefill_profile``), interpolated bilinearly. Engines send this
  quotient as ``token_s`` with each put, and with each use for which they computed a stored entry. A
  reuse adds no sample. Without a profile, the measured ``cost_s / num_tokens`` of the entry counts.

The paper's knowledge tree remembers nodes that no tier stores. Here ghost entries do, within a
bound.

Source: RAGCache section 5.1, formulas 2 to 4 and Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from ragcache_core.eviction.policy import EvictionCandidate
from ragcache_core.eviction.ranked import GhostEntries, RankedPolicy
from ragcache_core.store_api import REUSE, VariantUse

K = TypeVar("K", bound=Hashable)

WINDOW_S = 3600.0
"""Length of the window of Frequency. The paper gives no value."""


@dataclass(slots=True)
class _TreeNode:
    """A node of the knowledge tree. Two counters approximate a sliding window, see frequency."""

    window: int = 0  # number of the window that ``current`` counts
    current: float = 0.0
    previous: float = 0.0
    costs: int = 0
    mean_cost: float = 0.0  # seconds per token that was not cached
    priority: float = 0.0

    def frequency(self, now: float, window_s: float) -> float:
        """Return the retrievals in the window that ends now.

        Those of the previous full window count as evenly spread over it.
        """
        elapsed = now / window_s - self.window
        return self.current + self.previous * max(0.0, 1.0 - elapsed)

    def retrieve(self, now: float, window_s: float) -> None:
        window = int(now // window_s)
        if window != self.window:
            self.previous = self.current if window == self.window + 1 else 0.0
            self.current = 0.0
            self.window = window
        self.current += 1.0

    def add_cost(self, cost_per_token: float) -> None:
        self.costs += 1
        self.mean_cost += (cost_per_token - self.mean_cost) / self.costs


class PrefixAwareGreedyDualSizeFrequency(RankedPolicy[K, _TreeNode]):
    """Evicts the lowest priority first.

    RAGCache runs it with leaves_only. Without it (``blend``) it is the same policy without the
    tree.
    """

    def __init__(self, *, leaves_only: bool, window_s: float = WINDOW_S) -> None:
        super().__init__(leaves_only=leaves_only)
        if window_s <= 0:
            raise ValueError("window_s must be greater than 0")
        self._window_s = window_s
        self._clock = 0.0
        self._ghosts: GhostEntries[K, _TreeNode] = GhostEntries()

    def _initial_state(self, key: K, candidate: EvictionCandidate[K], now: float) -> _TreeNode:
        node = self._ghosts.pop(key) or _TreeNode(window=int(now // self._window_s))
        node.add_cost(candidate.token_s or candidate.cost_s / candidate.num_tokens)
        self._count_use(node, candidate, now, REUSE)
        return node

    def _count_use(
        self, state: _TreeNode, candidate: EvictionCandidate[K], now: float, use: VariantUse
    ) -> None:
        if use.token_s > 0:
            state.add_cost(use.token_s)
        state.retrieve(now, self._window_s)
        state.priority = self._clock + state.mean_cost * state.frequency(now, self._window_s)

    def _priority(self, state: _TreeNode, candidate: EvictionCandidate[K]) -> float:
        return state.priority

    def _on_evicted(self, key: K, state: _TreeNode, priority: float) -> None:
        self._clock = max(self._clock, priority)
        self._ghosts.put(key, state, len(self))
