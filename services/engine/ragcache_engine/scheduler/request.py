"""What the scheduler side knows of one request."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto

from ragcache_core.blend.selection import Blend
from ragcache_core.cluster.handoff import HandoffWait
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_core.plan.segments import NamedSegment, longest_exact_chain
from ragcache_core.store_api import AsOf, Held
from ragcache_engine.protocol.messages import SaveJob
from ragcache_engine.scheduler.lookup import Found
from ragcache_engine.telemetry.request_records import Record


class Phase(Enum):
    """Where a request is, as its record tells of it."""

    WAITING = auto()
    LOADING = auto()
    PREFILL = auto()
    DECODE = auto()


@dataclass(slots=True)
class Request:
    """One with a plan, or with none but a prompt of some length.

    segments: of a request without a plan none until its lookup has ended; of one that is handed
    over the pieces behind the plan's, too. asked: when the lookup was begun. may_save: how many of
    the first segments, None: all. awaits: another engine computes it; ask_at: when to ask for it
    again.
    """

    plan: ReusePlan
    token_ids: Sequence[int]
    segments: tuple[NamedSegment, ...]
    lookup: Future[Found] | None
    asked: float
    may_save: int | None = None
    awaits: HandoffWait | None = None
    ask_at: float | None = None
    stored: dict[VariantKey, Held] | None = None
    blend: Blend | None = None  # what it is put together from, if not of exact variants alone
    covered: tuple[int, int] | None = None  # tokens at hand, and where what is to be loaded ends
    tainted_from: int | None = None  # what is computed beyond leans on what is not exact
    tainted_before: int | None = None  # the same, before the load that is under way
    misses: dict[VariantKey, Miss] = field(default_factory=dict)
    as_of: Mapping[str, AsOf] = field(default_factory=dict)
    saved: dict[int, SaveJob] = field(default_factory=dict)  # by place
    load_failed: bool = False
    pending_load: tuple[int, int] | None = None  # [first, end) promised to vLLM
    loading: tuple[VariantKey, ...] = ()  # what the load under way is of
    holes: tuple[range, ...] = ()  # of that load, what nothing was held of
    phase: Phase = Phase.WAITING
    phase_since: float = field(default_factory=time.monotonic)
    record: Record = field(default_factory=Record)
    recorded: bool = False  # the record tells of the first token, and of nothing after it
    traceparent: str = ""

    def enter(self, phase: Phase) -> None:
        """Go on to a phase; what the one before took is on record."""
        now = time.monotonic()
        spent = now - self.phase_since
        if not self.recorded:
            match self.phase:
                case Phase.WAITING:
                    self.record.queue_s += spent
                case Phase.LOADING:
                    self.record.load_s += spent
                case Phase.PREFILL:
                    self.record.prefill_s += spent
                case Phase.DECODE:
                    pass
        self.phase, self.phase_since = phase, now

    @property
    def chain(self) -> tuple[NamedSegment, ...]:
        """What of it is held as exact, from its start on."""
        held = self.stored or {}
        return longest_exact_chain(self.segments, {key: one.info for key, one in held.items()})

    def places(self, runs: Sequence[range]) -> tuple[int, ...]:
        """Of the segments that any of these runs overlaps."""
        return tuple(
            place
            for place, named in enumerate(self.segments)
            if any(run.start < named.segment.end and named.segment.start < run.stop for run in runs)
        )

    def is_tainted(self, named: NamedSegment) -> bool:
        """Whether a segment leans on what is not exact, or is so itself."""
        return self.tainted_from is not None and named.segment.end > self.tainted_from

    def due(self, computed: int) -> list[int]:
        """Places of the variants that are whole with so many tokens, and that the store wants."""
        due = []
        for place, named in enumerate(self.segments):
            if named.segment.end > computed:
                break
            if self._is_wanted(place):
                due.append(place)
        return due

    def is_measured(self, computed: int) -> bool:
        """Whether what is computed from here on may be of a variant that is saved."""
        return any(
            named.segment.end > computed and (place in self.saved or self._is_wanted(place))
            for place, named in enumerate(self.segments)
        )

    def forget_from(self, missing: VariantKey) -> None:
        """Treat missing and what follows as not stored, so that it is saved anew."""
        stored = self.stored or {}
        names = [named.variant for named in self.segments]
        # One of another prefix is none of these: behind it there was nothing exact to be lost.
        for key in names[names.index(missing) :] if missing in names else [missing]:
            stored.pop(key, None)

    def _is_wanted(self, place: int) -> bool:
        """Whether the store would be better off with what this request computes."""
        if place in self.saved or (self.may_save is not None and place >= self.may_save):
            return False
        named = self.segments[place]
        if self.is_tainted(named):
            # Where nothing is held of a chunk, what was computed behind a blend is better.
            return self.blend is not None and named.segment.start in self.blend.unknown
        held = (self.stored or {}).get(named.variant)
        return held is None or not held.info.serves_exact or held.wanted_better
