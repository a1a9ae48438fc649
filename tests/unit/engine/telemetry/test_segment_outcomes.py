"""What became of each segment of a prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.identity.keys import KEY_BYTES, VariantKey
from ragcache_core.identity.variant import Miss
from ragcache_core.plan.reuse_plan import Segment
from ragcache_core.plan.segments import NamedSegment
from ragcache_engine.protocol.messages import VariantSpan
from ragcache_engine.telemetry.segment_outcomes import (
    AFTER_A_MISS,
    DID_NOT_ARRIVE,
    TOO_SHORT,
    PromptReuse,
    SpanSource,
    segment_outcomes,
)


def named(index: int, start: int, end: int) -> NamedSegment:
    chunk = index.to_bytes(KEY_BYTES, "big")
    return NamedSegment(Segment(chunk, start, end), VariantKey(chunk, b"p" * KEY_BYTES))


SEGMENTS = (named(0, 0, 10), named(1, 10, 30), named(2, 30, 60))
STORED = frozenset(one.variant for one in SEGMENTS)
NOTHING = PromptReuse(
    segments=SEGMENTS,
    local_tokens=0,
    loaded=range(0),
    spans=(),
    sources={},
    missing=frozenset(),
    recomputed=(),
    misses={},
    stored=frozenset(),
    problem="",
    min_load_tokens=16,
)


def loading(reuse: PromptReuse, *indexes: int, prefix: bytes = b"p") -> PromptReuse:
    """Return the reuse with a load of these segments."""
    ranges = [reuse.segments[index].segment for index in indexes]
    variants = [VariantKey(segment.chunk, prefix * KEY_BYTES) for segment in ranges]
    return replace(
        reuse,
        loaded=range(ranges[0].start, ranges[-1].end),
        spans=tuple(
            VariantSpan(variant, segment.start, segment.end)
            for variant, segment in zip(variants, ranges, strict=True)
        ),
        sources={
            segment.start: SpanSource(variant, "memory", 100, segment.start, 0.0)
            for variant, segment in zip(variants, ranges, strict=True)
        },
    )


def test_a_prompt_that_was_never_stored_says_so() -> None:
    misses = {SEGMENTS[0].variant: Miss.NEVER_STORED, SEGMENTS[1].variant: Miss.EVICTED}
    outcomes = segment_outcomes(replace(NOTHING, misses=misses))
    assert [one.reason for one in outcomes] == ["never stored", "evicted", "never stored"]
    assert not any(one.HasField("source") or one.loaded_tokens for one in outcomes)


def test_a_cached_prompt_needs_no_reason() -> None:
    outcomes = segment_outcomes(replace(NOTHING, local_tokens=60))
    assert [one.cached_tokens for one in outcomes] == [10, 20, 30]
    assert {one.reason for one in outcomes} == {""}


def test_a_load_names_tier_and_bytes_of_each_segment() -> None:
    outcomes = segment_outcomes(loading(replace(NOTHING, local_tokens=10, stored=STORED), 1, 2))
    assert [one.loaded_tokens for one in outcomes] == [0, 20, 30]
    assert [one.source.tier for one in outcomes] == ["", "memory", "memory"]
    assert [one.blended for one in outcomes] == [False, False, False]


def test_a_variant_of_another_prefix_is_blended() -> None:
    outcomes = segment_outcomes(loading(NOTHING, 1, 2, prefix=b"q"))
    assert [one.blended for one in outcomes] == [False, True, True]


def test_exact_reuse_cannot_reach_what_comes_after_a_miss() -> None:
    misses = {SEGMENTS[1].variant: Miss.EVICTED}
    stored = STORED - {SEGMENTS[1].variant}
    reuse = loading(replace(NOTHING, misses=misses, stored=stored), 0)
    assert [one.reason for one in segment_outcomes(reuse)] == ["", "evicted", AFTER_A_MISS]


def test_a_missing_chunk_between_loaded_ones_is_recomputed() -> None:
    reuse = replace(loading(replace(NOTHING, stored=STORED), 0, 1, 2), missing=frozenset({1}))
    missing = segment_outcomes(reuse)[1]
    assert (missing.loaded_tokens, missing.recomputed_tokens) == (0, 20)
    assert missing.reason == DID_NOT_ARRIVE


def test_recomputed_tokens_are_counted_by_segment() -> None:
    reuse = replace(loading(NOTHING, 1, 2, prefix=b"q"), recomputed=(range(25, 35), range(40, 41)))
    assert [one.recomputed_tokens for one in segment_outcomes(reuse)] == [0, 5, 6]


@pytest.mark.parametrize(
    ("problem", "expected"), [("store unavailable", "store unavailable"), ("", TOO_SHORT)]
)
def test_what_is_stored_and_not_loaded_names_the_problem(problem: str, expected: str) -> None:
    outcomes = segment_outcomes(replace(NOTHING, stored=STORED, problem=problem))
    assert {one.reason for one in outcomes} == {expected}


@given(
    local=st.integers(0, 70),
    load=st.integers(0, 60).flatmap(lambda a: st.integers(a, 60).map(lambda b: range(a, b))),
    loaded=st.sets(st.integers(0, 2)),
    missing=st.frozensets(st.integers(0, 2)),
)
def test_tokens_add_up_and_every_gap_has_a_reason(
    local: int, load: range, loaded: set[int], missing: frozenset[int]
) -> None:
    reuse = replace(NOTHING, local_tokens=local, stored=STORED, missing=missing)
    if loaded:
        reuse = replace(
            loading(reuse, *sorted(loaded)), loaded=range(max(local, load.start), load.stop)
        )
    for one in segment_outcomes(reuse):
        size = one.end - one.start
        assert 0 <= one.cached_tokens + one.loaded_tokens <= size
        assert 0 <= one.recomputed_tokens <= size
        assert (one.reason == "") == (one.cached_tokens + one.loaded_tokens == size)
        assert one.HasField("source") == (one.loaded_tokens > 0)
