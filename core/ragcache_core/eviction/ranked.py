"""A policy that evicts the entry of the lowest rank: a heap over the leaves.

Ranks change at uses, and a use rarely lowers one, so the heap is lazy: an entry stays under
the rank it had when it was pushed, and is pushed again when that comes up and is no longer its own.
A use is then O(1). An inner node leaves the heap when it comes up and returns with the loss of its
last child.

What may not go is set aside, within a bound, and comes back a little with every search: a search is
short however much is forbidden, and searches one after another still reach everything.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from ragcache_core.eviction.policy import (
    MAX_PROTECTED_PER_SEARCH,
    EvictionCandidate,
    EvictionPolicy,
)
from ragcache_core.eviction.resident_children import ResidentChildren

K = TypeVar("K", bound=Hashable)
S = TypeVar("S")

Rank = tuple[float, int]
"""(worth, number of the use that set it): equal worths go by age."""


class _Entry(Generic[K, S]):
    """An entry's books. queued: the rank under which the heap holds it, None if it does not."""

    __slots__ = ("candidate", "queued", "rank", "state")

    def __init__(self, candidate: EvictionCandidate[K], state: S, rank: Rank) -> None:
        self.candidate = candidate
        self.state = state
        self.rank = rank
        self.queued: Rank | None = None


class RankedPolicy(EvictionPolicy[K], Generic[K, S]):
    """Everything but the rank. S: what a policy keeps of an entry, changed in place."""

    def __init__(self, *, leaves_only: bool) -> None:
        super().__init__(leaves_only=leaves_only)
        self._entries: dict[K, _Entry[K, S]] = {}
        self._children: ResidentChildren[K] = ResidentChildren()
        self._heap: list[tuple[Rank, K]] = []
        # Items that were in the heap, and may not go.
        self._passed: deque[tuple[Rank, K]] = deque()
        self._uses = 0

    @abstractmethod
    def _initial_state(self, key: K, candidate: EvictionCandidate[K], now: float) -> S:
        """State of an entry that is added, its first use counted."""

    @abstractmethod
    def _count_use(
        self, state: S, candidate: EvictionCandidate[K], now: float, fix_overhead: float
    ) -> None:
        """Count another use."""

    @abstractmethod
    def _priority(self, state: S, candidate: EvictionCandidate[K]) -> float:
        """Rank after the last use."""

    def _on_evicted(self, key: K, state: S, worth: float) -> None:
        """Told of every victim."""

    def add(self, key: K, candidate: EvictionCandidate[K], now: float) -> None:
        """See Policy.add."""
        entry = self._entries.get(key)
        if entry is None:
            state = self._initial_state(key, candidate, now)
            entry = _Entry(candidate, state, self._rank(state, candidate))
            self._entries[key] = entry
        else:
            self._leave(entry.candidate.parent)
            entry.candidate = candidate
            self._count_use(entry.state, candidate, now, 0.0)
            entry.rank = self._rank(entry.state, candidate)
        self._children.add(candidate.parent)
        self._queue(key, entry)

    def touch(self, key: K, now: float, fix_overhead: float = 0.0) -> None:
        """See Policy.touch."""
        entry = self._entries.get(key)
        if entry is None:
            return
        self._count_use(entry.state, entry.candidate, now, fix_overhead)
        entry.rank = self._rank(entry.state, entry.candidate)
        if entry.queued is not None and entry.rank < entry.queued:
            self._queue(key, entry)

    def resize(self, key: K, candidate: EvictionCandidate[K]) -> None:
        """See Policy.resize."""
        entry = self._entries[key]
        entry.candidate = candidate
        entry.rank = (self._priority(entry.state, candidate), entry.rank[1])
        if entry.queued is not None and entry.rank < entry.queued:
            self._queue(key, entry)

    def remove(self, key: K) -> None:
        """See Policy.remove."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._leave(entry.candidate.parent)
            self._compact()

    def evict(self, may: Callable[[K], bool]) -> K | None:
        """See Policy.evict."""
        key = self.advance_to_victim(may)
        if key is not None:
            entry = self._entries[key]
            self.remove(key)
            self._on_evicted(key, entry.state, entry.rank[0])
        return key

    def advance_to_victim(self, may: Callable[[K], bool]) -> K | None:
        """See Policy.cheapest."""
        if not self._heap:
            self._bring_back(MAX_PROTECTED_PER_SEARCH)
        forbidden: list[tuple[Rank, K]] = []
        found: K | None = None
        while self._heap and len(forbidden) < MAX_PROTECTED_PER_SEARCH:
            rank, key = self._heap[0]
            entry = self._entries.get(key)
            if entry is None or entry.queued != rank:  # gone, or queued elsewhere in the heap
                heapq.heappop(self._heap)
            elif self.leaves_only and not self._children.is_leaf(key):
                heapq.heappop(self._heap)
                entry.queued = None
            elif entry.rank != rank:
                entry.queued = entry.rank
                heapq.heapreplace(self._heap, (entry.rank, key))
            elif may(key):
                found = key
                break
            else:
                forbidden.append(heapq.heappop(self._heap))
        self._passed += forbidden
        if found is not None:
            self._bring_back(_BROUGHT_BACK)
        elif not self._passed:
            return self._cheapest_of_a_ring(may)
        elif not self._heap:
            self._bring_back(MAX_PROTECTED_PER_SEARCH)
        return found

    def _bring_back(self, most: int) -> None:
        """Into the heap what was passed over, the first of it first."""
        for _ in range(min(most, len(self._passed))):
            rank, key = self._passed.popleft()
            entry = self._entries.get(key)
            if entry is not None and entry.queued == rank:
                heapq.heappush(self._heap, (rank, key))

    def _cheapest_of_a_ring(self, may: Callable[[K], bool]) -> K | None:
        """Without a leaf, everything left is an ancestor of itself."""
        allowed = [key for key in self._entries if may(key)]
        return min(allowed, key=lambda key: self._entries[key].rank, default=None)

    def is_leaf(self, key: K) -> bool:
        """See Policy.is_leaf."""
        return self._children.is_leaf(key)

    def priority(self, key: K, now: float) -> float:
        """See Policy.worth."""
        return self._entries[key].rank[0]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def check(self) -> None:
        """See Policy.check."""
        self._children.check(entry.candidate.parent for entry in self._entries.values())
        in_heap = {*self._heap, *self._passed}
        for key, entry in self._entries.items():
            if entry.queued is None:
                assert self.leaves_only
                assert not self._children.is_leaf(key)
            else:
                assert entry.queued <= entry.rank
                assert (entry.queued, key) in in_heap
        assert len(self._heap) + len(self._passed) <= 2 * len(self._entries) + _SLACK

    def _rank(self, state: S, candidate: EvictionCandidate[K]) -> Rank:
        self._uses += 1
        return self._priority(state, candidate), self._uses

    def _rank_anew(self) -> None:
        """Every rank has changed, and not in step: O(n)."""
        for entry in self._entries.values():
            entry.rank = (self._priority(entry.state, entry.candidate), entry.rank[1])
            if entry.queued is not None:
                entry.queued = entry.rank
        self._heap = self._queued()

    def _queue(self, key: K, entry: _Entry[K, S]) -> None:
        entry.queued = entry.rank
        heapq.heappush(self._heap, (entry.rank, key))
        self._compact()

    def _leave(self, parent: K | None) -> None:
        """A child of parent goes; a parent that turns leaf may be a victim again."""
        if self._children.remove(parent) and parent in self._entries:
            entry = self._entries[parent]
            if entry.queued is None:
                self._queue(parent, entry)

    def _compact(self) -> None:
        """Drop the stale items once they are the most: O(1) amortised."""
        if len(self._heap) + len(self._passed) > 2 * len(self._entries) + _SLACK:
            self._heap = self._queued()

    def _queued(self) -> list[tuple[Rank, K]]:
        """A heap of what it has to hold; nothing counts as passed over any more."""
        self._passed.clear()
        heap = [
            (entry.queued, key) for key, entry in self._entries.items() if entry.queued is not None
        ]
        heapq.heapify(heap)
        return heap


_SLACK = 64
_BROUGHT_BACK = 32
"""Of what was passed over, how much a search that found something leaves for the next one."""
