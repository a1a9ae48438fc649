"""A bounded queue of prefills to compute while the engine is idle, ordered by priority.

    priority = uses * saved_s / num_tokens

``uses`` are retrievals, decayed: those a half-life ago count half. ``saved_s`` is the time that a
question spent on computing the tokens because their KV was not stored. After the template a token
of any chunk takes about the same time. So the priority is proportional to the expected seconds that
questions save for each second of idle prefill. It is PGDSF's frequency times cost by size (RAGCache
section 5.1), with a half-life in place of its clock. Therefore the order changes at uses only, as
in ``eviction.score``.

Chunks that were written but never retrieved have no priority yet. They come last, the most central
ones first, and those of unknown centrality after them in the order of writing. A chunk is central
if its nearest neighbours among all chunks are similar to it. Then more questions are near it, too.

Chunks for ``blend`` are computed in sequences (``next_sequence``): the head of the queue with the
other queued chunks of its document, and with the next ones of the queue if the document is short.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ragcache_core.cluster.recent_deletes import RecentDeletes
from ragcache_core.identity.keys import PUBLIC_DOMAIN

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
"""

FULL_SHARE = 0.5
"""A sequence with this share of its most characters is not filled further: the chunks of other
documents are then better computed with their own neighbours."""

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
        ordinal: Index of the chunk in its document, if the prefill has one chunk and it is known.
        domain: Access domain of the KV.
    """

    texts: tuple[str, ...]
    documents: tuple[str, ...]
    planned_at_ms: int
    mode: Literal["exact", "blend"] = "blend"
    ordinal: int | None = None
    domain: str = PUBLIC_DOMAIN

    @property
    def may_join_sequence(self) -> bool:
        """Whether it may be computed after other chunks: one chunk that is blended."""
        return self.mode == "blend" and len(self.texts) == 1

    @cached_property
    def name(self) -> bytes:
        """16-byte hash of the chunks, their order, the mode and the domain."""
        hasher = hashlib.blake2b(f"{self.mode}\0{self.domain}\0".encode(), digest_size=16)
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


Position = tuple[str, int]
"""Name of a document and index of a chunk in it."""

_SortKey = tuple[float, float, int, bytes]
"""log2 of the priority, negated; the centrality, negated; a number by time of arrival; the
prefill's name."""


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
        self._centralities: dict[bytes, float] = {}
        self._names_by_position: dict[Position, bytes] = {}
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

    def rank_document(self, document: str, centralities: Sequence[float]) -> None:
        """Order the queued chunks of a document by how central they are.

        Args:
            document: Name of the document.
            centralities: Of each of its chunks. Higher is more central.
        """
        for ordinal, centrality in enumerate(centralities):
            name = self._names_by_position.get((document, ordinal))
            if name is not None and math.isfinite(centrality):
                self._centralities[name] = centrality
                self._put(self._queued[name])

    def unranked_documents(self) -> list[str]:
        """Return the documents with queued chunks of unknown centrality, in order of the queue."""
        unranked = (
            self._queued[sort_key[-1]]
            for sort_key in self._order
            if sort_key[-1] not in self._centralities
        )
        return list(dict.fromkeys(one.documents[0] for one in unranked if one.ordinal is not None))

    def next_sequence(self, now_ms: int, max_chars: int) -> list[QueuedPrefill]:
        """Return the prefills to compute next as one prompt, in its order; empty if there is none.

        The head of the queue comes with its neighbours, and all of them stay in the queue. The
        chunks of a document are cut into groups of consecutive ones, and the head's group is
        returned. A group that is short is filled with the chunks that are next in the queue. All of
        them are for the domain of the head.

        Args:
            now_ms: Unix time.
            max_chars: Most characters of the prefills together. The head may be longer.
        """
        head = self.advance_to_first(now_ms)
        if head is None or not head.prefill.may_join_sequence:
            return [] if head is None else [head]
        names = self._group_of(head.prefill.name, max_chars)
        num_chars = sum(map(self._num_chars, names))
        if num_chars < max_chars * FULL_SHARE:
            for *_, name in self._order:
                if num_chars >= max_chars * FULL_SHARE:
                    break
                may_join = self._may_follow(name, head.prefill) and name not in names
                if may_join and num_chars + self._num_chars(name) <= max_chars:
                    names.append(name)
                    num_chars += self._num_chars(name)
        return [self._entry(self._sort_keys[name]) for name in names]

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

    def is_queued(self, prefill: Prefill) -> bool:
        """Whether it is in the queue."""
        return prefill.name in self._queued

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

    def forget_all(self, at_ms: int) -> None:
        """Remove every prefill, as any document may have been deleted or replaced.

        Args:
            at_ms: Unix time. A prefill that was planned until then is not queued again.
        """
        self._deletes.record_all(at_ms)
        for name in tuple(self._queued):
            self._remove(name)
            self._demand.pop(name, None)

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
        assert self._centralities.keys() <= self._queued.keys()
        assert all(
            (self._queued[name].documents[0], self._queued[name].ordinal) == position
            for position, name in self._names_by_position.items()
        )

    def _put(self, prefill: Prefill) -> list[QueuedPrefill]:
        """Queue a prefill by its priority; one that is queued already keeps its arrival number."""
        name = prefill.name
        centrality = self._centralities.get(name)
        known = self._queued.get(name)
        before = None if known is None else self._remove(name)
        if known is not None and prefill.ordinal is None and known.documents == prefill.documents:
            prefill = replace(prefill, ordinal=known.ordinal)
        self._num_arrived += 1
        number = self._num_arrived if before is None else before[2]
        if centrality is None:
            centrality = _NEVER
        else:
            self._centralities[name] = centrality
        sort_key = (self._negative_priority(name), -centrality, number, name)
        self._queued[name], self._sort_keys[name] = prefill, sort_key
        insort(self._order, sort_key)
        if prefill.ordinal is not None:
            self._names_by_position[prefill.documents[0], prefill.ordinal] = name
        for document in prefill.documents:
            self._names_by_document.setdefault(document, set()).add(name)
        self._num_bytes += prefill.num_bytes
        dropped = []
        while self._num_bytes > self._max_bytes:
            dropped.append(self._entry(self._order[-1]))
            self._remove(self._order[-1][-1])
        return dropped

    def _remove(self, name: bytes) -> _SortKey:
        prefill, sort_key = self._queued.pop(name), self._sort_keys.pop(name)
        self._centralities.pop(name, None)
        del self._order[bisect_left(self._order, sort_key)]
        for document in set(prefill.documents):
            names = self._names_by_document[document]
            names.discard(name)
            if not names:
                del self._names_by_document[document]
        if prefill.ordinal is not None:
            position = (prefill.documents[0], prefill.ordinal)
            if self._names_by_position.get(position) == name:
                del self._names_by_position[position]
        self._num_bytes -= prefill.num_bytes
        return sort_key

    def _group_of(self, head: bytes, max_chars: int) -> list[bytes]:
        """Return the group of consecutive chunks of its document that the head is in."""
        first = self._queued[head]
        names = [
            name
            for name in self._names_by_document[first.documents[0]]
            if self._may_follow(name, first)
        ]
        names.sort(key=self._order_in_document)
        group: list[bytes] = []
        num_chars = 0
        for name in names:
            if group and num_chars + self._num_chars(name) > max_chars:
                if head in group:
                    break
                group, num_chars = [], 0
            group.append(name)
            num_chars += self._num_chars(name)
        return group

    def _may_follow(self, name: bytes, first: Prefill) -> bool:
        """Whether a prefill may be in a sequence with another one."""
        prefill = self._queued[name]
        return prefill.may_join_sequence and prefill.domain == first.domain

    def _order_in_document(self, name: bytes) -> tuple[float, int]:
        ordinal = self._queued[name].ordinal
        return (math.inf if ordinal is None else ordinal, self._sort_keys[name][2])

    def _num_chars(self, name: bytes) -> int:
        return sum(map(len, self._queued[name].texts))

    def _entry(self, sort_key: _SortKey) -> QueuedPrefill:
        source: Literal["written", "asked"] = "written" if sort_key[0] == -_NEVER else "asked"
        return QueuedPrefill(self._queued[sort_key[-1]], source)

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
