"""What the connector's scheduler knows of one request."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import takewhile

from ragcache_core.blend.variant_selection import Blend
from ragcache_core.cluster.handoff_polling import HandoffPolling
from ragcache_core.cost.load_or_compute import PredictedTime
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss
from ragcache_core.plan.reuse_plan import Handoff, ReusePlan
from ragcache_core.plan.segments import NamedSegment, longest_exact_chain
from ragcache_core.store_api import AsOf, StoredVariant
from ragcache_engine.protocol.messages import SaveJob, VariantSpan
from ragcache_engine.scheduler.lookup import LookupResult
from ragcache_engine.telemetry.request_records import RequestRecord
from ragcache_engine.telemetry.segment_outcomes import PromptReuse, SpanSource


class RequestPhase(Enum):
    """A phase of a request. Its record has the time of each but the last."""

    WAITING = auto()
    LOADING = auto()
    PREFILL = auto()
    DECODE = auto()


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request as vLLM hands it to the connector."""

    request_id: str
    token_ids: Sequence[int]
    # The request's ``kv_transfer_params``, as the client sent them.
    params: object = None
    # Which clients share blocks in vLLM's own prefix cache.
    cache_salt: str | None = None
    # vLLM's own prefix cache would serve this request.
    cacheable: bool = True
    # W3C trace context of the request's span. Empty: it is not traced.
    traceparent: str = ""
    # vLLM's hashes of the prompt's full blocks.
    block_hashes: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """How much of a prompt to load, decided for a number of locally cached tokens."""

    # Tokens that vLLM's own prefix cache has.
    num_local: int
    # Position up to which the request loads KV.
    end: int
    # None: load exact variants only.
    blend: Blend | None = None
    # The request loads less than the store has, because computing the rest is faster.
    compute_is_faster: bool = False
    # Expected time until the prompt is computed. None: not known.
    predicted: PredictedTime | None = None
    # What the request does not load because computing is faster, and would if its tiers were fast
    # enough. Such a load is measured when the engine is idle (``LoadProber``).
    declined: tuple[VariantSpan, ...] = ()


@dataclass(slots=True)
class RequestState:
    """A request with a plan, or one without a plan whose prompt is long enough."""

    plan: ReusePlan
    token_ids: Sequence[int]
    # Without a plan: empty until the lookup has finished. Under a handoff: the plan's segments and
    # the pieces after them.
    segments: tuple[NamedSegment, ...]
    lookup: Future[LookupResult] | None
    lookup_started: float
    # How many of the leading segments the request may save. None: all of them.
    num_savable: int | None = None

    # Pieces under which one engine hands off what it has blended, and another one loads it.
    blended_pieces: tuple[NamedSegment, ...] = ()
    # Of them, how many the engine has saved.
    num_pieces_saved: int = 0
    # Set where another engine computes the prompt, with the time of the next lookup.
    handoff: HandoffPolling | None = None
    next_lookup: float | None = None

    # The store's answer. ``stored`` is None until it is there.
    stored: dict[VariantKey, StoredVariant] | None = None
    misses: dict[VariantKey, Miss] = field(default_factory=dict)
    as_of: Mapping[str, AsOf] = field(default_factory=dict)

    # How to build the prompt from variants that are not all exact. None: from exact ones only.
    blend: Blend | None = None
    decision: LoadDecision | None = None
    # [first, end) that the connector promised to vLLM.
    pending_load: tuple[int, int] | None = None

    # The last load: what it reads, and where from, by the start of the span.
    spans: tuple[VariantSpan, ...] = ()
    span_sources: Mapping[int, SpanSource] = field(default_factory=dict)
    # Positions of chunks that the store does not have, in the range of the load.
    missing_ranges: tuple[range, ...] = ()
    load_failed: bool = False

    # Positions of the finished load that the next pass of the request has to recompute.
    left_to_recompute: tuple[range, ...] = ()
    # The same, kept for the record.
    recomputed_runs: tuple[range, ...] = ()
    # Loaded ranges that are not exact, and tokens of them that this pass shifts.
    loaded_chunks: tuple[range, ...] = ()
    shifted_runs: tuple[range, ...] = ()

    # KV after this position is not exact, or was computed after KV that is not.
    approximate_after: int | None = None
    # The same, before the load in flight.
    previous_approximate_after: int | None = None

    # How many tokens vLLM's own prefix cache had when the prefill began. None: it has not begun.
    local_tokens: int | None = None
    # The first position that the prefill computes. None: it has not begun, or begins again.
    computed_from: int | None = None
    # The position up to which its last step computes.
    computed_to: int = 0
    # T(cached, computed) / computed of the prefill; 0: unknown.
    token_s: float = 0.0

    # By index of their segment.
    saved: dict[int, SaveJob] = field(default_factory=dict)

    phase: RequestPhase = RequestPhase.WAITING
    phase_started: float = field(default_factory=time.monotonic)
    record: RequestRecord = field(default_factory=RequestRecord)
    # The record ends with the first token and does not change afterwards.
    recorded: bool = False
    traceparent: str = ""

    def enter(self, phase: RequestPhase) -> None:
        """Enter a phase, and add the time of the last one to the record."""
        now = time.monotonic()
        seconds = now - self.phase_started
        if not self.recorded:
            match self.phase:
                case RequestPhase.WAITING:
                    self.record.queue_s += seconds
                case RequestPhase.LOADING:
                    self.record.load_s += seconds
                case RequestPhase.PREFILL:
                    self.record.prefill_s += seconds
                case RequestPhase.DECODE:
                    pass
        self.phase, self.phase_started = phase, now

    def end_handoff(self) -> None:
        """Record that the other engine has computed the prompt, or is late: no time in a queue."""
        now = time.monotonic()
        if not self.recorded:
            self.record.prefill_s += now - self.phase_started
        self.phase_started = now

    def adopt(self, decision: LoadDecision) -> None:
        """Store how much of the prompt to load."""
        self.decision = decision
        self.blend = decision.blend or self.blend
        if not self.recorded:
            self.record.compute_is_faster = decision.compute_is_faster
            self.record.predicted = decision.predicted

    def disable_blend(self) -> None:
        """Use exact variants only from now on."""
        self.blend = self.decision = None

    @property
    def loading(self) -> tuple[VariantKey, ...]:
        """Return the variants of the last load."""
        return tuple(span.variant for span in self.spans)

    def reuse(self, min_load_tokens: int) -> PromptReuse:
        """Return what the request has reused of its prompt. Call it at the first token."""
        record = self.record
        first = record.loaded_from
        return PromptReuse(
            segments=self.segments,
            local_tokens=record.local_tokens,
            loaded=range(first, first + record.loaded_tokens),
            spans=self.spans if record.loaded_tokens else (),
            sources=self.span_sources,
            missing=frozenset(record.missing_chunks),
            recomputed=self.recomputed_runs if record.loaded_tokens else (),
            misses=self.misses,
            stored=frozenset(self.stored or ()),
            problem=record.reported_miss,
            min_load_tokens=min_load_tokens,
        )

    @property
    def exact_chain(self) -> tuple[NamedSegment, ...]:
        """Return the leading segments whose exact variants are stored."""
        stored = self.stored or {}
        infos = {key: entry.info for key, entry in stored.items()}
        return longest_exact_chain(self.segments, infos)

    def overlapping_segments(self, ranges: Sequence[range]) -> tuple[int, ...]:
        """Return the indexes of the segments that overlap any of the ranges."""
        return tuple(
            index
            for index, named in enumerate(self.segments)
            if any(r.start < named.segment.end and named.segment.start < r.stop for r in ranges)
        )

    def is_approximate(self, named: NamedSegment) -> bool:
        """Tell whether a segment's KV is not exact, or was computed after KV that is not."""
        return self.approximate_after is not None and named.segment.end > self.approximate_after

    def blend_may_have_writer(self) -> bool:
        """Tell whether a variant of the blend may depend on a text that a key has written."""
        if self.blend is None:
            return True
        used = [source.variant for source in self.blend.sources if source.variant is not None]
        stored = self.stored or {}
        return any(key not in stored or stored[key].influence.writer for key in used)

    def segments_to_save(self, computed: int) -> list[int]:
        """Return the indexes of the segments that end within the first ``computed`` tokens.

        Segments that the store has already, or does not want, are left out.
        """
        indexes = []
        for index, named in enumerate(self.segments):
            if named.segment.end > computed:
                break
            if self._should_save(index):
                indexes.append(index)
        return indexes

    def take_blended_pieces(self, computed: int) -> tuple[NamedSegment, ...]:
        """Return the pieces to save that end within the first ``computed`` tokens, once each.

        Without an approximate load the prompt is exact, and saved under the names of its segments.
        """
        if self.plan.handoff is not Handoff.PREFILL or self.approximate_after is None:
            return ()
        left = self.blended_pieces[self.num_pieces_saved :]
        taken = tuple(takewhile(lambda one: one.segment.end <= computed, left))
        self.num_pieces_saved += len(taken)
        return taken

    def needs_compute_cost(self, computed: int) -> bool:
        """Tell whether a variant that is saved has tokens after the first ``computed`` ones."""
        return any(
            named.segment.end > computed and (index in self.saved or self._should_save(index))
            for index, named in enumerate(self.segments)
        )

    def begin_prefill(self, computed: int, token_s: float) -> None:
        """Record that the prefill begins after the first ``computed`` tokens, or begins again."""
        if self.local_tokens is None:
            # After a preemption the prefix cache also has what this request has computed.
            self.local_tokens = self.record.local_tokens
        self.computed_from, self.token_s = computed, token_s

    def variants_in_prefix_cache(self) -> list[VariantKey]:
        """Return the variants whose KV was in vLLM's own prefix cache when the prefill began."""
        cached = self.local_tokens or 0
        return [named.variant for named in self.segments if named.segment.end <= cached]

    def variants_computed_again(self) -> list[VariantKey]:
        """Return the variants that the request computed and did not save: they are stored."""
        if self.computed_from is None:
            return []
        return [
            named.variant
            for index, named in enumerate(self.segments)
            if named.segment.start >= self.computed_from
            and named.segment.end <= self.computed_to
            and index not in self.saved
            and named.variant in (self.stored or {})
        ]

    def mark_missing_from(self, missing: VariantKey) -> None:
        """Treat a variant and all after it as not stored, so that this request saves them again."""
        stored = self.stored or {}
        names = [named.variant for named in self.segments]
        # A variant after another prefix is not among them: after it there was nothing exact.
        for key in names[names.index(missing) :] if missing in names else [missing]:
            stored.pop(key, None)

    def _should_save(self, index: int) -> bool:
        """Tell whether the store needs what this request computes of a segment."""
        if index in self.saved or (self.num_savable is not None and index >= self.num_savable):
            return False
        named = self.segments[index]
        if self.is_approximate(named):
            # An approximate variant is better than none.
            return self.blend is not None and named.segment.start in self.blend.not_stored
        entry = (self.stored or {}).get(named.variant)
        return entry is None or not entry.info.serves_exact or entry.wants_higher_precision


def exact_spans(request: RequestState, first: int, end: int) -> tuple[VariantSpan, ...]:
    """Return the exact variants of prompt tokens [first, end)."""
    return tuple(
        VariantSpan(named.variant, named.segment.start, named.segment.end)
        for named in request.segments
        if named.segment.end > first and named.segment.start < end
    )


def blend_spans(blend: Blend, first: int, end: int) -> tuple[VariantSpan, ...]:
    """Return the variants that a blend uses for prompt tokens [first, end)."""
    return tuple(
        VariantSpan(source.variant, source.start, source.end, source.base_position, source.mismatch)
        for source in blend.sources
        if source.variant is not None and source.end > first and source.start < end
    )
