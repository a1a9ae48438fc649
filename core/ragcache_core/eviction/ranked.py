"""Base of policies that evict the entry of the lowest rank: a heap over the leaves.

A use changes a rank and rarely lowers it, so the heap is lazy. An entry stays under the rank it was
pushed with. It is pushed again when that rank reaches the top and is out of date. So a use takes
O(1). An inner node leaves the heap when it reaches the top, and returns when its last child leaves.

A search sets protected entries aside, within a bound, and each search returns a few of them to the
heap. So one search is short however many entries are protected, and consecutive searches still
reach every entry.

LRU is the simplest of these policies: the least recently used entry is evicted first.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from typing_extensions import override

from ragcache_core.eviction.policy import (
    MAX_PROTECTED_PER_SEARCH,
    EvictionCandidate,
    EvictionPolicy,
)
from ragcache_core.store_api import REUSE, VariantUse

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MIN_GHOSTS = 65_536
"""Least number of ghosts, at about 200 bytes each.

In a small tier most keys return only after many others, so its memory must reach far beyond the
entries that it stores.
"""
GHOSTS_PER_ENTRY = 2


class GhostEntries(Generic[K, V]):
    """A bounded mapping: a put beyond its limit drops the oldest entry."""

    def __init__(self) -> None:
        self._values: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def put(self, key: K, value: V, num_stored: int) -> None:
        """Remember a value for a key.

        Args:
            num_stored: Number of entries that the tier stores, which sets the limit.
        """
        self._values[key] = value
        self._values.move_to_end(key)
        limit = max(MIN_GHOSTS, GHOSTS_PER_ENTRY * num_stored)
        while len(self._values) > limit:
            self._values.popitem(last=False)

    def get(self, key: K) -> V | None:
        """Return the value of key, or None, and keep it."""
        return self._values.get(key)

    def pop(self, key: K) -> V | None:
        """Return the value of key, or None, and forget it."""
        return self._values.pop(key, None)


class ResidentChildren(Generic[K]):
    """Counts the resident children of every parent. The parent need not be resident."""

    def __init__(self) -> None:
        self._num_children: dict[K, int] = {}

    def is_leaf(self, key: K) -> bool:
        """Whether no child of key is resident."""
        return key not in self._num_children

    def add(self, parent: K | None) -> None:
        """Record that a child of parent has become resident."""
        if parent is not None:
            self._num_children[parent] = self._num_children.get(parent, 0) + 1

    def remove(self, parent: K | None) -> bool:
        """Record that a child of parent is no longer resident.

        Returns:
            Whether parent has become a leaf by this.
        """
        if parent is None:
            return False
        left = self._num_children[parent] - 1
        if left:
            self._num_children[parent] = left
            return False
        del self._num_children[parent]
        return True

    def check(self, parents: Iterable[K | None]) -> None:
        """Raise AssertionError unless parents are those of all resident entries."""
        counted: dict[K, int] = {}
        for parent in parents:
            if parent is not None:
                counted[parent] = counted.get(parent, 0) + 1
        assert counted == self._num_children


S = TypeVar("S")

Rank = tuple[float, int]
"""(priority, number of the use that set it): equal priorities are ordered by age."""


class _RankedEntry(Generic[K, S]):
    """State of one entry.

    Attributes:
        queued: The rank under which the heap contains the entry. None: it does not.
    """

    __slots__ = ("candidate", "queued", "rank", "state")

    def __init__(self, candidate: EvictionCandidate[K], state: S, rank: Rank) -> None:
        self.candidate = candidate
        self.state = state
        self.rank = rank
        self.queued: Rank | None = None


class RankedPolicy(EvictionPolicy[K], Generic[K, S]):
    """Implements everything but the priority.

    S is the state that a policy keeps of each entry, changed in place.
    """

    def __init__(self, *, leaves_only: bool) -> None:
        super().__init__(leaves_only=leaves_only)
        self._entries: dict[K, _RankedEntry[K, S]] = {}
        self._children: ResidentChildren[K] = ResidentChildren()
        self._heap: list[tuple[Rank, K]] = []
        # Protected items that a search removed from the heap.
        self._set_aside: deque[tuple[Rank, K]] = deque()
        self._uses = 0

    @abstractmethod
    def _initial_state(self, key: K, candidate: EvictionCandidate[K], now: float) -> S:
        """Return the state of an entry that is added, with its first use counted."""

    @abstractmethod
    def _count_use(
        self, state: S, candidate: EvictionCandidate[K], now: float, use: VariantUse
    ) -> None:
        """Count another use."""

    @abstractmethod
    def _priority(self, state: S, candidate: EvictionCandidate[K]) -> float:
        """Return the priority after the last use."""

    def _on_evicted(self, key: K, state: S, priority: float) -> None:
        """Handle the eviction of an entry."""

    @override
    def add(self, key: K, candidate: EvictionCandidate[K], now: float) -> None:
        entry = self._entries.get(key)
        if entry is None:
            state = self._initial_state(key, candidate, now)
            entry = _RankedEntry(candidate, state, self._rank(state, candidate))
            self._entries[key] = entry
        else:
            self._remove_child(entry.candidate.parent)
            entry.candidate = candidate
            # A full computation: its CFO is 1.
            use = VariantUse(fix_overhead=1.0, token_s=candidate.token_s)
            self._count_use(entry.state, candidate, now, use)
            entry.rank = self._rank(entry.state, candidate)
        self._children.add(candidate.parent)
        self._push(key, entry)

    @override
    def touch(self, key: K, now: float, use: VariantUse = REUSE) -> None:
        entry = self._entries.get(key)
        if entry is None:
            return
        self._count_use(entry.state, entry.candidate, now, use)
        entry.rank = self._rank(entry.state, entry.candidate)
        if entry.queued is not None and entry.rank < entry.queued:
            self._push(key, entry)

    @override
    def resize(self, key: K, candidate: EvictionCandidate[K]) -> None:
        entry = self._entries[key]
        entry.candidate = candidate
        entry.rank = (self._priority(entry.state, candidate), entry.rank[1])
        if entry.queued is not None and entry.rank < entry.queued:
            self._push(key, entry)

    @override
    def remove(self, key: K) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._remove_child(entry.candidate.parent)
            self._compact()

    @override
    def evict(self, may_evict: Callable[[K], bool]) -> K | None:
        key = self.advance_to_victim(may_evict)
        if key is not None:
            entry = self._entries[key]
            self.remove(key)
            self._on_evicted(key, entry.state, entry.rank[0])
        return key

    @override
    def advance_to_victim(self, may_evict: Callable[[K], bool]) -> K | None:
        if not self._heap:
            self._return_to_heap(MAX_PROTECTED_PER_SEARCH)
        protected: list[tuple[Rank, K]] = []
        found: K | None = None
        while self._heap and len(protected) < MAX_PROTECTED_PER_SEARCH:
            rank, key = self._heap[0]
            entry = self._entries.get(key)
            if entry is None or entry.queued != rank:  # removed, or under another rank
                heapq.heappop(self._heap)
            elif self.leaves_only and not self._children.is_leaf(key):
                heapq.heappop(self._heap)
                entry.queued = None
            elif entry.rank != rank:
                entry.queued = entry.rank
                heapq.heapreplace(self._heap, (entry.rank, key))
            elif may_evict(key):
                found = key
                break
            else:
                protected.append(heapq.heappop(self._heap))
        self._set_aside += protected
        if found is not None:
            self._return_to_heap(_RETURNED_PER_SEARCH)
        elif not self._set_aside:
            return self._lowest_in_cycle(may_evict)
        elif not self._heap:
            self._return_to_heap(MAX_PROTECTED_PER_SEARCH)
        return found

    def _return_to_heap(self, max_items: int) -> None:
        """Return up to max_items entries that were set aside to the heap, oldest first."""
        for _ in range(min(max_items, len(self._set_aside))):
            rank, key = self._set_aside.popleft()
            entry = self._entries.get(key)
            if entry is not None and entry.queued == rank:
                heapq.heappush(self._heap, (rank, key))

    def _lowest_in_cycle(self, may_evict: Callable[[K], bool]) -> K | None:
        """Return the lowest rank when every entry left is an ancestor of itself."""
        allowed = [key for key in self._entries if may_evict(key)]
        return min(allowed, key=lambda key: self._entries[key].rank, default=None)

    @override
    def is_leaf(self, key: K) -> bool:
        return self._children.is_leaf(key)

    @override
    def priority(self, key: K, now: float) -> float:
        return self._entries[key].rank[0]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @override
    def check(self) -> None:
        self._children.check(entry.candidate.parent for entry in self._entries.values())
        in_heap = {*self._heap, *self._set_aside}
        for key, entry in self._entries.items():
            if entry.queued is None:
                assert self.leaves_only
                assert not self._children.is_leaf(key)
            else:
                assert entry.queued <= entry.rank
                assert (entry.queued, key) in in_heap
        assert len(self._heap) + len(self._set_aside) <= 2 * len(self._entries) + _SLACK

    def _rank(self, state: S, candidate: EvictionCandidate[K]) -> Rank:
        self._uses += 1
        return self._priority(state, candidate), self._uses

    def _recompute_ranks(self) -> None:
        """Recompute all ranks, whose order has changed. Takes O(n)."""
        for entry in self._entries.values():
            entry.rank = (self._priority(entry.state, entry.candidate), entry.rank[1])
            if entry.queued is not None:
                entry.queued = entry.rank
        self._heap = self._rebuilt_heap()

    def _push(self, key: K, entry: _RankedEntry[K, S]) -> None:
        entry.queued = entry.rank
        heapq.heappush(self._heap, (entry.rank, key))
        self._compact()

    def _remove_child(self, parent: K | None) -> None:
        """Remove a child of parent. A parent without children may be a victim again."""
        if self._children.remove(parent) and parent in self._entries:
            entry = self._entries[parent]
            if entry.queued is None:
                self._push(parent, entry)

    def _compact(self) -> None:
        """Rebuild the heap once most of its items are stale. Takes amortized O(1)."""
        if len(self._heap) + len(self._set_aside) > 2 * len(self._entries) + _SLACK:
            self._heap = self._rebuilt_heap()

    def _rebuilt_heap(self) -> list[tuple[Rank, K]]:
        """Return a heap of all queued entries, including those that were set aside."""
        self._set_aside.clear()
        heap = [
            (entry.queued, key) for key, entry in self._entries.items() if entry.queued is not None
        ]
        heapq.heapify(heap)
        return heap


_SLACK = 64
_RETURNED_PER_SEARCH = 32
"""Entries set aside that a successful search returns to the heap."""


@dataclass(slots=True)
class _LastUse:
    number: int


class LeastRecentlyUsed(RankedPolicy[K, _LastUse]):
    """Ranks entries by the sequence number of their last use."""

    def _initial_state(self, key: K, candidate: EvictionCandidate[K], now: float) -> _LastUse:
        return _LastUse(self._uses)

    def _count_use(
        self, state: _LastUse, candidate: EvictionCandidate[K], now: float, use: VariantUse
    ) -> None:
        state.number = self._uses

    def _priority(self, state: _LastUse, candidate: EvictionCandidate[K]) -> float:
        return float(state.number)
