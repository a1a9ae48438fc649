"""What is computed before anybody asks: a bounded queue, ordered by what a prefill is worth.

    worth = uses * saved_s / num_tokens

uses are retrievals, decayed: those a half-life ago count half. saved_s is what a question spent on
computing the tokens because their KV was not there. A token takes about the same behind the
template whichever chunk it is of, so this is, but for one factor that all have in common, the
seconds that questions are expected to be spared for each second of idle prefill. It is PGDSF's
frequency times cost by size (RAGCache §5.1), with a half-life in place of its clock, so that the
order changes at uses only (as in ``policies/score``).

What was written and never asked for is worth nothing yet: it comes last, in the order of writing.
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
"""Decayed misses before the present one from which on a prefill is queued: one, a half-life ago.
What a question had to compute, its engine saves; a second miss says that this came to nothing, or
did not last."""

PATIENCE = 3.0
"""How many times more misses it takes each time that a prefill was done with. What stays, questions
find; what is computed and missed again, the store does not keep."""

MAX_AGE_MS = 86_400_000
"""A day, in which an idle hour comes. What waits longer is forgotten: a delete that another gateway
was told of is not known here."""

_OVERHEAD_BYTES = 1024
_NEVER = -math.inf


@dataclass(frozen=True)
class Prefill:
    """Chunks that are computed right behind the template, in their order.

    texts: of the chunks. documents: the name of each one's. planned_at_ms: Unix time before they
    were written, or searched; a delete since then goes first. mode: how questions reuse it.
    """

    texts: tuple[str, ...]
    documents: tuple[str, ...]
    planned_at_ms: int
    mode: Literal["exact", "blend"] = "blend"

    @cached_property
    def name(self) -> bytes:
        """The same for the same chunks in the same order and mode, 16 bytes."""
        hasher = hashlib.blake2b(self.mode.encode(), digest_size=16)
        for text in self.texts:
            raw = text.encode()
            hasher.update(len(raw).to_bytes(8, "little") + raw)
        return hasher.digest()

    @cached_property
    def num_bytes(self) -> int:
        """About what it holds: its texts, and what else there is of each one that waits."""
        return sum(_OVERHEAD_BYTES + len(text.encode()) for text in self.texts)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A prefill that waits. source: asked, if a question missed it; else only written."""

    prefill: Prefill
    source: Literal["written", "asked"]


_Place = tuple[float, int, bytes]
"""log2 of the worth, negative; a number by the time it came; its name."""


@dataclass(slots=True)
class _Demand:
    """log2 of decayed sums, as of time 0 so that they need no upkeep, and of saved_s by token.

    misses: since it was last done with. times: that it was.
    """

    uses: float = _NEVER
    misses: float = _NEVER
    saved_s: float = _NEVER
    times: int = 0


class PrecomputeQueue:
    """Prefills that wait for idle time. Not for several threads at once.

    most_bytes: of the texts that wait; what is worth least is dropped. most_known: prefills whose
    demand is remembered, those asked for last.
    """

    def __init__(self, *, most_bytes: int, half_life_s: float, most_known: int = 1 << 16) -> None:
        self._most_bytes = most_bytes
        self._half_life_s = half_life_s
        self._most_known = most_known
        self._waiting: dict[bytes, Prefill] = {}
        self._places: dict[bytes, _Place] = {}
        self._order: list[_Place] = []
        self._of_document: dict[str, set[bytes]] = {}
        self._demand: OrderedDict[bytes, _Demand] = OrderedDict()
        self._deletes = RecentDeletes()
        self._num_bytes = 0
        self._came = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def write(self, prefill: Prefill) -> list[Waiting]:
        """Chunks of a document that was written just now; returns what is dropped for them."""
        return self._put(prefill)

    def postpone(self, prefill: Prefill) -> None:
        """It cannot be computed now: all others that wait come first, unless it is missed again."""
        if prefill.name in self._waiting:
            self._take(prefill.name)
            self._demand.pop(prefill.name, None)
            self._put(prefill)

    def ask(
        self, prefill: Prefill, now: float, *, num_tokens: int, saved_s: float
    ) -> list[Waiting]:
        """A question had these chunks, of num_tokens; returns what is dropped for them.

        now: seconds on a clock that never goes back. saved_s: what it spent on computing them; 0
        where their KV was there. Chunks of a document that was deleted since the search are left
        alone.
        """
        if self.is_forgotten(prefill):
            return []
        name = prefill.name
        demand = self._demand.setdefault(name, _Demand())
        self._demand.move_to_end(name)
        if len(self._demand) > self._most_known:
            self._demand.popitem(last=False)
        missed_before = demand.misses - now / self._half_life_s
        wanted = math.log2(MISSED_BEFORE) + demand.times * math.log2(PATIENCE)
        demand.uses = self._with_one_more(demand.uses, now)
        if saved_s > 0:
            demand.misses = self._with_one_more(demand.misses, now)
            demand.saved_s = math.log2(saved_s / num_tokens)
        if name in self._waiting or (saved_s > 0 and missed_before >= wanted):
            return self._put(prefill)
        return []

    def first(self, now_ms: int) -> Waiting | None:
        """What is worth most; it goes on waiting. now_ms: Unix time; what is too old is let go."""
        while self._order:
            one = self._at(self._order[0])
            if now_ms - one.prefill.planned_at_ms <= MAX_AGE_MS:
                return one
            self._take(one.prefill.name)
        return None

    def remove(self, prefill: Prefill) -> None:
        """It is done with, whatever became of it."""
        if prefill.name in self._waiting:
            self._take(prefill.name)
        if (demand := self._demand.get(prefill.name)) is not None:
            demand.misses = _NEVER
            demand.times += 1

    def is_forgotten(self, prefill: Prefill) -> bool:
        """Whether a document of it was deleted since it was planned."""
        return self._deletes.cover(prefill.documents, prefill.planned_at_ms)

    def forget(self, document: str, at_ms: int) -> int:
        """A document is gone, or another one is in its place; how many of its prefills waited.

        at_ms: Unix time; what was planned until then is not taken up again.
        """
        self._deletes.note(document, at_ms)
        names = tuple(self._of_document.get(document, ()))
        for name in names:
            self._take(name)
            self._demand.pop(name, None)
        return len(names)

    def check(self) -> None:
        """Raises AssertionError where two of its books disagree."""
        assert self._order == sorted(self._places.values())
        assert self._places.keys() == self._waiting.keys()
        assert self._num_bytes == sum(one.num_bytes for one in self._waiting.values())
        assert self._num_bytes <= self._most_bytes
        assert all(self._of_document.values())
        assert {(d, n) for d, names in self._of_document.items() for n in names} == {
            (d, n) for n, one in self._waiting.items() for d in one.documents
        }
        assert len(self._demand) <= self._most_known

    def _put(self, prefill: Prefill) -> list[Waiting]:
        """Have it wait at its place, in that of an earlier one if there is one."""
        name = prefill.name
        before = self._take(name) if name in self._waiting else None
        self._came += 1
        place = (self._negative_worth(name), self._came if before is None else before[1], name)
        self._waiting[name], self._places[name] = prefill, place
        insort(self._order, place)
        for document in prefill.documents:
            self._of_document.setdefault(document, set()).add(name)
        self._num_bytes += prefill.num_bytes
        dropped = []
        while self._num_bytes > self._most_bytes:
            dropped.append(self._at(self._order[-1]))
            self._take(self._order[-1][2])
        return dropped

    def _take(self, name: bytes) -> _Place:
        prefill, place = self._waiting.pop(name), self._places.pop(name)
        del self._order[bisect_left(self._order, place)]
        for document in set(prefill.documents):
            names = self._of_document[document]
            names.discard(name)
            if not names:
                del self._of_document[document]
        self._num_bytes -= prefill.num_bytes
        return place

    def _at(self, place: _Place) -> Waiting:
        return Waiting(self._waiting[place[2]], "written" if place[0] == -_NEVER else "asked")

    def _negative_worth(self, name: bytes) -> float:
        demand = self._demand.get(name)
        return -_NEVER if demand is None else -(demand.uses + demand.saved_s)

    def _with_one_more(self, log_sum: float, now: float) -> float:
        """log2 of the sum and of one more at now, as of time 0."""
        one = now / self._half_life_s
        if log_sum == _NEVER:
            return one
        low, high = sorted((log_sum, one))
        return high + math.log2(1.0 + 2.0 ** (low - high))
