"""PGDSF, RAGCache's prefix-aware replacement (§5.1): formulas 2 to 4 and Algorithm 1.

Priority = Clock + Frequency * Cost / Size, where

- Clock belongs to the tier (one policy object each) and rises to the priority of what is evicted;
  an entry's own clock and priority are set when it is retrieved,
- Frequency counts its retrievals in a time window, over its stays in the tier,
- Cost / Size is the mean, over the requests that did not find it, of the seconds per token they
  computed. ``EvictionCandidate.cost_s / num_tokens`` is one such sample: the engine divides T(cached,
  uncached) of the request by its uncached tokens.

The knowledge tree remembers nodes that no tier holds; here ghosts do, bounded.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from ragcache_core.eviction.ghosts import GhostEntries
from ragcache_core.eviction.policy import EvictionCandidate
from ragcache_core.eviction.ranked import RankedPolicy

K = TypeVar("K", bound=Hashable)

WINDOW_S = 3600.0
"""The paper names no length."""


@dataclass(slots=True)
class _Node:
    """A node of the knowledge tree. Two counters stand for a sliding window: see frequency."""

    window: int = 0  # number of the window that ``current`` counts
    current: float = 0.0
    before: float = 0.0
    costs: int = 0
    mean_cost: float = 0.0  # seconds per token that was not cached
    priority: float = 0.0

    def frequency(self, now: float, window_s: float) -> float:
        """Retrievals in the window that ends now, those of the last whole one spread evenly."""
        into = now / window_s - self.window
        return self.current + self.before * max(0.0, 1.0 - into)

    def retrieve(self, now: float, window_s: float) -> None:
        window = int(now // window_s)
        if window != self.window:
            self.before = self.current if window == self.window + 1 else 0.0
            self.current = 0.0
            self.window = window
        self.current += 1.0

    def pay(self, cost_per_token: float) -> None:
        self.costs += 1
        self.mean_cost += (cost_per_token - self.mean_cost) / self.costs


class PrefixAwareGreedyDualSizeFrequency(RankedPolicy[K, _Node]):
    """RAGCache runs it with leaves_only; in ``blend`` it is the same without the tree."""

    def __init__(self, *, leaves_only: bool, window_s: float = WINDOW_S) -> None:
        super().__init__(leaves_only=leaves_only)
        if window_s <= 0:
            raise ValueError("window_s is more than 0")
        self._window_s = window_s
        self._clock = 0.0
        self._ghosts: GhostEntries[K, _Node] = GhostEntries()

    def _initial_state(self, key: K, candidate: EvictionCandidate[K], now: float) -> _Node:
        node = self._ghosts.pop(key) or _Node(window=int(now // self._window_s))
        node.pay(candidate.cost_s / candidate.num_tokens)
        self._count_use(node, candidate, now, 0.0)
        return node

    def _count_use(
        self, state: _Node, candidate: EvictionCandidate[K], now: float, fix_overhead: float
    ) -> None:
        state.retrieve(now, self._window_s)
        state.priority = self._clock + state.mean_cost * state.frequency(now, self._window_s)

    def _priority(self, state: _Node, candidate: EvictionCandidate[K]) -> float:
        return state.priority

    def _on_evicted(self, key: K, state: _Node, worth: float) -> None:
        self._clock = max(self._clock, worth)
        self._ghosts.put(key, state, len(self))
