"""S3-FIFO: a small queue, a main queue, and ghost entries.

A new entry joins the small queue. At the head of the small queue it moves to the main queue if it
was used more than once, else it is evicted and remembered. A remembered key returns to the main
queue. At the head of the main queue an entry with uses left loses one and moves to the tail; an
entry without uses is evicted. Queues are measured in bytes, where the paper counts entries.

An inner node (leaves_only) is removed from its queue when it reaches the head. It is queued again
when its last child leaves, so that no search passes it twice.

Source: Yang et al., SOSP 2023.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from enum import Enum
from typing import Generic, TypeVar

from ragcache_core.eviction.ghosts import GhostEntries
from ragcache_core.eviction.policy import (
    MAX_PROTECTED_PER_SEARCH,
    EvictionCandidate,
    EvictionPolicy,
)
from ragcache_core.eviction.resident_children import ResidentChildren
from ragcache_core.store_api import REUSE, VariantUse

K = TypeVar("K", bound=Hashable)

SMALL_SHARE = 0.1
"""Share of the stored bytes in the small queue (10 % in the paper)."""
MAX_USES = 3


class _Queue(Enum):
    SMALL = 0
    MAIN = 1


class _QueueEntry(Generic[K]):
    __slots__ = ("candidate", "queue", "queued", "uses")

    def __init__(self, candidate: EvictionCandidate[K], queue: _Queue) -> None:
        self.candidate = candidate
        self.queue = queue
        self.queued = True
        self.uses = 0


class S3Fifo(EvictionPolicy[K]):
    """Counts uses up to MAX_USES."""

    def __init__(self, *, leaves_only: bool) -> None:
        super().__init__(leaves_only=leaves_only)
        self._entries: dict[K, _QueueEntry[K]] = {}
        self._children: ResidentChildren[K] = ResidentChildren()
        self._queues: dict[_Queue, OrderedDict[K, None]] = {
            _Queue.SMALL: OrderedDict(),
            _Queue.MAIN: OrderedDict(),
        }
        self._small_bytes = 0
        self._stored_bytes = 0
        self._ghosts: GhostEntries[K, None] = GhostEntries()

    def add(self, key: K, candidate: EvictionCandidate[K], now: float) -> None:
        entry = self._entries.get(key)
        if entry is not None:
            self._count_bytes(entry, -1)
            self._remove_child(entry.candidate.parent)
            entry.candidate = candidate
            entry.uses = min(MAX_USES, entry.uses + 1)
        else:
            returns = key in self._ghosts
            self._ghosts.pop(key)
            entry = _QueueEntry(candidate, _Queue.MAIN if returns else _Queue.SMALL)
            self._entries[key] = entry
            self._queues[entry.queue][key] = None
        self._count_bytes(entry, 1)
        self._children.add(candidate.parent)

    def touch(self, key: K, now: float, use: VariantUse = REUSE) -> None:
        entry = self._entries.get(key)
        if entry is not None:
            entry.uses = min(MAX_USES, entry.uses + 1)

    def resize(self, key: K, candidate: EvictionCandidate[K]) -> None:
        entry = self._entries[key]
        self._count_bytes(entry, -1)
        entry.candidate = candidate
        self._count_bytes(entry, 1)

    def remove(self, key: K) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._queues[entry.queue].pop(key, None)
            self._count_bytes(entry, -1)
            self._remove_child(entry.candidate.parent)

    def evict(self, may_evict: Callable[[K], bool]) -> K | None:
        key = self.advance_to_victim(may_evict)
        if key is not None:
            if self._entries[key].queue is _Queue.SMALL:
                self._ghosts.put(key, None, len(self))
            self.remove(key)
        return key

    def advance_to_victim(self, may_evict: Callable[[K], bool]) -> K | None:
        """See EvictionPolicy.advance_to_victim.

        Moves entries between the queues as ``evict`` does.
        """
        protected: list[K] = []
        found: K | None = None
        while found is None and len(protected) < MAX_PROTECTED_PER_SEARCH:
            queue = self._next_queue()
            if not self._queues[queue]:
                break
            key = next(iter(self._queues[queue]))
            entry = self._entries[key]
            if self.leaves_only and not self._children.is_leaf(key):
                del self._queues[queue][key]
                entry.queued = False
            elif not may_evict(key):
                del self._queues[queue][key]
                protected.append(key)
            elif queue is _Queue.SMALL and entry.uses > 1:
                self._move_to_main(key, entry)
            elif queue is _Queue.MAIN and entry.uses > 0:
                entry.uses -= 1
                self._queues[queue].move_to_end(key)
            else:
                found = key
        if found is None and not protected:
            # Without a leaf, every entry left is an ancestor of itself.
            return next((key for key in self._entries if may_evict(key)), None)
        # Beyond the limit they go to the tail, so that the next search meets other entries.
        to_head = len(protected) < MAX_PROTECTED_PER_SEARCH
        for key in reversed(protected) if to_head else protected:
            queue_of_key = self._queues[self._entries[key].queue]
            queue_of_key[key] = None
            queue_of_key.move_to_end(key, last=not to_head)
        return found

    def is_leaf(self, key: K) -> bool:
        return self._children.is_leaf(key)

    def priority(self, key: K, now: float) -> float:
        """Return a number in [0, 7]: entries of the main queue are above the others."""
        entry = self._entries[key]
        return entry.uses + (MAX_USES + 1 if entry.queue is _Queue.MAIN else 0)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def check(self) -> None:
        entries = self._entries.values()
        self._children.check(entry.candidate.parent for entry in entries)
        assert self._stored_bytes == sum(entry.candidate.num_bytes for entry in entries)
        assert self._small_bytes == sum(
            entry.candidate.num_bytes for entry in entries if entry.queue is _Queue.SMALL
        )
        for key, entry in self._entries.items():
            assert (key in self._queues[entry.queue]) == entry.queued
            assert entry.queued or not self._children.is_leaf(key)
        assert sum(map(len, self._queues.values())) == sum(entry.queued for entry in entries)

    def _next_queue(self) -> _Queue:
        small, main = self._queues[_Queue.SMALL], self._queues[_Queue.MAIN]
        is_over = self._small_bytes > SMALL_SHARE * self._stored_bytes
        return _Queue.SMALL if small and (is_over or not main) else _Queue.MAIN

    def _move_to_main(self, key: K, entry: _QueueEntry[K]) -> None:
        del self._queues[_Queue.SMALL][key]
        self._small_bytes -= entry.candidate.num_bytes
        entry.queue = _Queue.MAIN
        entry.uses = 0
        self._queues[_Queue.MAIN][key] = None

    def _count_bytes(self, entry: _QueueEntry[K], sign: int) -> None:
        num_bytes = sign * entry.candidate.num_bytes
        self._stored_bytes += num_bytes
        if entry.queue is _Queue.SMALL:
            self._small_bytes += num_bytes

    def _remove_child(self, parent: K | None) -> None:
        if self._children.remove(parent) and parent in self._entries:
            entry = self._entries[parent]
            if not entry.queued:
                entry.queued = True
                self._queues[entry.queue][parent] = None
