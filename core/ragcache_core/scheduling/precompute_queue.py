"""A bounded queue of prefills to compute while the engine is idle, ordered by priority.

    priority = uses * saved_s / num_tokens

``uses`` are retrievals, decayed: those a half-life ago count half. ``saved_s`` is the time that a
question spent on computing the tokens because their KV was not stored. After the template a token
of any chunk takes about the same time. So the priority is proportional to the expected seconds that
questions save for each second of idle prefill. It is PGDSF's frequency times cost by size (RAGCache
section 5.1), with a half-life in place of its clock. Therefore the order changes at uses only, as
in ``eviction.score``.

Chunks that were written but never retrieved have no priority yet: they come last, in the order of
writing.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ragcache_core.cluster.recent_deletes import RecentDeletes

MISSED_BEFORE = 0.5
"""A missed prefill is queued if it had this many decayed misses before: one, a half-life ago.

The engine saves what a question had to compute. A second miss shows that the value was not saved or
did not stay.
"""

MISS_GROWTH = 3.0
"""Factor by which the misses that queue a prefill grow each time that it is done.

If the value stays, questions find it. If it is computed and missed again, the store evicts it.
"""

MAX_AGE_MS = 86_400_000
"""One day, in which an idle hour is likely. An older prefill is dropped.

This gateway does not know of deletes that another gateway received.
"""

_OVERHEAD_BYTES = 1024
_NEVER = -math.inf


@dataclass(frozen=True)
class Prefill:
    """Chunks to compute right after the template, in their order.

    Attributes:
        texts: Of the chunks.
        documents: Name of each chunk's document.
        planned_at_ms: Unix time before the chunks were written or searched. A later delete of a
            document cancels the prefill.
        mode: How questions reuse the KV.
    """

    texts: tuple[str, ...]
    documents: tuple[str, ...]
    planned_at_ms: int
    mode: Literal["exact", "blend"] = "blend"

    @cached_property
    def name(self) -> bytes:
        """16-byte hash of the chunks, their order and the mode."""
        hasher = hashlib.blake2b(self.mode.encode(), digest_size=16)
        for text in self.texts:
            raw = text.encode()
            hasher.update(len(raw).to_bytes(8, "little") + raw)
        return hasher.digest()

    @cached_property
    def num_bytes(self) -> int:
        """Approximate memory of a queued prefill."""
        return sum(_OVERHEAD_BYTES + len(text.encode()) for text in self.texts)


@dataclass(frozen=True, slots=True)
class QueuedPrefill:
    """A prefill in the queue. source: "asked" if a question missed it, else "written"."""

    prefill: Prefill
    source: Literal["written", "asked"]


_SortKey = tuple[float, int, bytes]
"""log2 of the priority, negated; a number by time of arrival; the prefill's name."""


@dataclass(slots=True)
class _Demand:
    """How often a prefill was retrieved and missed.

    Decayed sums and seconds are log2 values. The sums are as of time 0, so they need no updates as
    time goes by.

    Attributes:
        uses: Decayed retrievals.
        misses: Decayed misses since the prefill was last done.
        saved_s: Seconds per token.
        num_done: How often the prefill was done.
    """

    uses: float = _NEVER
    misses: float = _NEVER
    saved_s: float = _NEVER
    num_done: int = 0


class PrecomputeQueue:
    """Prefills that wait for idle time. Not safe for use by several threads.

    Args:
        max_bytes: Bound of the queued texts. Beyond it the prefills of lowest priority are dropped.
        half_life_s: Half-life of uses and misses.
        max_known: Number of prefills whose demand is remembered, most recently asked for.
    """

    def __init__(self, *, max_bytes: int, half_life_s: float, max_known: int = 1 << 16) -> None:
        self._max_bytes = max_bytes
        self._half_life_s = half_life_s
        self._max_known = max_known
        self._queued: dict[bytes, Prefill] = {}
        self._sort_keys: dict[bytes, _SortKey] = {}
        self._order: list[_SortKey] = []
        self._names_by_document: dict[str, set[bytes]] = {}
        self._demand: OrderedDict[bytes, _Demand] = OrderedDict()
        self._deletes = RecentDeletes()
        self._num_bytes = 0
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._queued)

    def add_written(self, prefill: Prefill) -> list[QueuedPrefill]:
        """Queue chunks of a document that was just written.

        Returns:
            The prefills that are dropped to make room.
        """
        return self._put(prefill)

    def postpone(self, prefill: Prefill) -> None:
        """Move a prefill that cannot be computed now to the end of the queue.

        A later miss moves it forward again.
        """
        if prefill.name in self._queued:
            self._remove(prefill.name)
            self._demand.pop(prefill.name, None)
            self._put(prefill)

    def record_question(
        self, prefill: Prefill, now: float, *, num_tokens: int, saved_s: float
    ) -> list[QueuedPrefill]:
        """Record that a question retrieved these chunks, and queue them if they are missed often.

        A question about a document that was deleted since its search is ignored.

        Args:
            prefill: The chunks.
            now: Seconds of a monotonic clock.
            num_tokens: Of the chunks.
            saved_s: Seconds that the question spent on computing them. 0: their KV was stored.

        Returns:
            The prefills that are dropped to make room.
        """
        if self.is_deleted(prefill):
            return []
        name = prefill.name
        demand = self._demand.setdefault(name, _Demand())
        self._demand.move_to_end(name)
        if len(self._demand) > self._max_known:
            self._demand.popitem(last=False)
        missed_before = demand.misses - now / self._half_life_s
        required = math.log2(MISSED_BEFORE) + demand.num_done * math.log2(MISS_GROWTH)
        demand.uses = self._plus_one(demand.uses, now)
        if saved_s > 0:
            demand.misses = self._plus_one(demand.misses, now)
            demand.saved_s = math.log2(saved_s / num_tokens)
        if name in self._queued or (saved_s > 0 and missed_before >= required):
            return self._put(prefill)
        return []

    def advance_to_first(self, now_ms: int) -> QueuedPrefill | None:
        """Drop expired prefills from the head of the queue and return the new head.

        The head stays in the queue.

        Args:
            now_ms: Unix time.
        """
        while self._order:
            head = self._entry(self._order[0])
            if now_ms - head.prefill.planned_at_ms <= MAX_AGE_MS:
                return head
            self._remove(head.prefill.name)
        return None

    def mark_done(self, prefill: Prefill) -> None:
        """Remove a prefill that was computed or that failed."""
        if prefill.name in self._queued:
            self._remove(prefill.name)
        if (demand := self._demand.get(prefill.name)) is not None:
            demand.misses = _NEVER
            demand.num_done += 1

    def is_deleted(self, prefill: Prefill) -> bool:
        """Whether one of its documents was deleted since it was planned."""
        return self._deletes.may_include(prefill.documents, prefill.planned_at_ms)

    def forget_document(self, document: str, at_ms: int) -> int:
        """Remove the prefills of a document that was deleted or replaced.

        Args:
            document: Name of the document.
            at_ms: Unix time. A prefill that was planned until then is not queued again.

        Returns:
            Number of prefills that were queued.
        """
        self._deletes.record(document, at_ms)
        names = tuple(self._names_by_document.get(document, ()))
        for name in names:
            self._remove(name)
            self._demand.pop(name, None)
        return len(names)

    def check(self) -> None:
        """Raise AssertionError if the internal state is inconsistent."""
        assert self._order == sorted(self._sort_keys.values())
        assert self._sort_keys.keys() == self._queued.keys()
        assert self._num_bytes == sum(one.num_bytes for one in self._queued.values())
        assert self._num_bytes <= self._max_bytes
        assert all(self._names_by_document.values())
        assert {(d, n) for d, names in self._names_by_document.items() for n in names} == {
            (d, n) for n, one in self._queued.items() for d in one.documents
        }
        assert len(self._demand) <= self._max_known

    def _put(self, prefill: Prefill) -> list[QueuedPrefill]:
        """Queue a prefill by its priority; one that is queued already keeps its arrival number."""
        name = prefill.name
        before = self._remove(name) if name in self._queued else None
        self._num_arrived += 1
        number = self._num_arrived if before is None else before[1]
        sort_key = (self._negative_priority(name), number, name)
        self._queued[name], self._sort_keys[name] = prefill, sort_key
        insort(self._order, sort_key)
        for document in prefill.documents:
            self._names_by_document.setdefault(document, set()).add(name)
        self._num_bytes += prefill.num_bytes
        dropped = []
        while self._num_bytes > self._max_bytes:
            dropped.append(self._entry(self._order[-1]))
            self._remove(self._order[-1][2])
        return dropped

    def _remove(self, name: bytes) -> _SortKey:
        prefill, sort_key = self._queued.pop(name), self._sort_keys.pop(name)
        del self._order[bisect_left(self._order, sort_key)]
        for document in set(prefill.documents):
            names = self._names_by_document[document]
            names.discard(name)
            if not names:
                del self._names_by_document[document]
        self._num_bytes -= prefill.num_bytes
        return sort_key

    def _entry(self, sort_key: _SortKey) -> QueuedPrefill:
        source: Literal["written", "asked"] = "written" if sort_key[0] == -_NEVER else "asked"
        return QueuedPrefill(self._queued[sort_key[2]], source)

    def _negative_priority(self, name: bytes) -> float:
        demand = self._demand.get(name)
        return -_NEVER if demand is None else -(demand.uses + demand.saved_s)

    def _plus_one(self, log_sum: float, now: float) -> float:
        """Return log2 of the sum plus one event at now, as of time 0."""
        one = now / self._half_life_s
        if log_sum == _NEVER:
            return one
        low, high = sorted((log_sum, one))
        return high + math.log2(1.0 + 2.0 ** (low - high))
