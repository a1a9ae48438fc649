"""Tells where the KV of each segment of a prompt came from, and why it was not reused."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss
from ragcache_core.plan.segments import NamedSegment
from ragcache_engine.protocol.messages import VariantSpan, miss_reason
from ragcache_wire.v1 import engine_pb2 as pb

AFTER_A_MISS = "after a missing chunk"
"""Reason of a stored segment that `exact` reuse cannot reach."""

DID_NOT_ARRIVE = "did not arrive in time"
"""Reason of a segment that was stored when the load began."""

TOO_SHORT = "too short to load"
"""Reason of a stored segment, where fewer tokens are left than a load has at least."""


@dataclass(frozen=True, slots=True)
class SpanSource:
    """Where a load reads the variant of one segment from.

    Attributes:
        variant: The variant, which may have been computed after another prefix.
        tier: Tier of the engine or of the store.
        num_bytes: Bytes that the load reads.
        base_position: Position of the variant's first token when it was computed.
        fix_overhead: CCI * (1 - beta') of this use of the variant.
    """

    variant: VariantKey
    tier: str
    num_bytes: int
    base_position: int
    fix_overhead: float

    def to_message(self) -> pb.LoadSource:
        """Return what gateways learn of the source."""
        return pb.LoadSource(
            tier=self.tier,
            num_bytes=self.num_bytes,
            base_position=self.base_position,
            fix_overhead=self.fix_overhead,
            prefix=self.variant.prefix,
        )


@dataclass(frozen=True, slots=True)
class PromptReuse:
    """What a request knows of the reuse of its prompt when the first token comes.

    Attributes:
        segments: The valid segments of the plan.
        local_tokens: Leading tokens in vLLM's own prefix cache.
        loaded: The loaded tokens. Empty: none.
        spans: What the load read, ascending.
        sources: Where each span came from, by its start.
        missing: Indexes of segments that were computed between loaded ones.
        recomputed: Tokens among loaded ones that were computed, as ranges.
        misses: Why variants are not stored.
        stored: Variants that the store has.
        problem: Why the request loaded nothing more. Empty: nothing went wrong.
        min_load_tokens: Fewer tokens are not loaded.
    """

    segments: Sequence[NamedSegment]
    local_tokens: int
    loaded: range
    spans: Sequence[VariantSpan]
    sources: Mapping[int, SpanSource]
    missing: frozenset[int]
    recomputed: Sequence[range]
    misses: Mapping[VariantKey, Miss]
    stored: frozenset[VariantKey]
    problem: str
    min_load_tokens: int


def segment_outcomes(reuse: PromptReuse) -> tuple[pb.SegmentRecord, ...]:
    """Return the outcome of each segment, in the order of the prompt."""
    starts = [span.start for span in reuse.spans]
    outcomes = []
    reachable = True
    for index, named in enumerate(reuse.segments):
        start, end = named.segment.start, named.segment.end
        cached = max(0, min(end, reuse.local_tokens) - start)
        is_missing = index in reuse.missing
        # What another engine handed off may have other borders than the segments.
        span = reuse.spans[i - 1] if (i := bisect_right(starts, start)) else None
        is_loaded = span is not None and start < span.end and not is_missing
        loaded = _overlap(range(start, end), reuse.loaded) if is_loaded else 0
        recomputed = sum(_overlap(range(start, end), one) for one in reuse.recomputed)
        if is_missing:
            recomputed = end - start - cached
        reason = ""
        if cached + loaded < end - start:
            reason = _reason(reuse, named, is_missing=is_missing, reachable=reachable)
        reachable = reachable and named.variant not in reuse.misses
        source = reuse.sources.get(span.start) if loaded and span is not None else None
        outcomes.append(
            pb.SegmentRecord(
                start=start,
                end=end,
                cached_tokens=cached,
                loaded_tokens=loaded,
                recomputed_tokens=min(recomputed, end - start),
                source=None if source is None else source.to_message(),
                blended=source is not None and source.variant != named.variant,
                reason=reason,
            )
        )
    return tuple(outcomes)


def _reason(reuse: PromptReuse, named: NamedSegment, *, is_missing: bool, reachable: bool) -> str:
    """Return why a segment was computed, at least in part."""
    if (miss := reuse.misses.get(named.variant)) is not None:
        return miss_reason(miss)
    if is_missing:
        return DID_NOT_ARRIVE
    if not reachable and named.variant in reuse.stored:
        return AFTER_A_MISS
    if reuse.problem:
        return reuse.problem
    return miss_reason(Miss.NEVER_STORED) if named.variant not in reuse.stored else TOO_SHORT


def _overlap(one: range, other: range) -> int:
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))
