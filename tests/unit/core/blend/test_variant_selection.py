"""Which variant each chunk is loaded from, which chunks are missing, and what is recomputed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.blend.observation import ChunkObservation
from ragcache_core.blend.prefix_overlap import (
    AttendedChunk,
    PrefixChunk,
    estimated_overlap,
    prefix_overlap,
)
from ragcache_core.blend.variant_selection import (
    Blend,
    BlendSource,
    VariantCandidate,
    most_promising,
    select_variants,
)
from ragcache_core.identity.keys import KEY_BYTES, VariantKey
from ragcache_core.identity.variant import Provenance, Tier, VariantInfo
from ragcache_core.plan.reuse_plan import Action, Segment
from ragcache_core.plan.segments import NamedSegment
from ragcache_core.store_api import StoredVariant

HERE = 1000
"""Number of the prefix before the first segment; those of other prompts are lower."""

CHUNKS = 5
"""So few that prompts and old prefixes have some in common."""


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def segments_of(*parts: tuple[int, int], head: int = 0) -> tuple[NamedSegment, ...]:
    """Of (chunk, tokens); chunk -1 is of what may only be exact, as the head is."""
    named: list[NamedSegment] = []
    position = 0
    for chunk, tokens in [(-1, head), *parts] if head else parts:
        action = Action.BLEND if chunk >= 0 else Action.EXACT
        name = key(chunk if chunk >= 0 else 2**64)
        segment = Segment(name, position, position + tokens, action)
        named.append(NamedSegment(segment, VariantKey(name, key(HERE + len(named)))))
        position += tokens
    return tuple(named)


def tokens_of(named: NamedSegment) -> int:
    return named.segment.end - named.segment.start


def seen(
    influence: Sequence[float], *attended: tuple[int, int, float], intra: float = 1.0
) -> ChunkObservation:
    """Return an observation after chunks of (number, tokens, attention)."""
    before = tuple(AttendedChunk(key(chunk), tokens, inter) for chunk, tokens, inter in attended)
    return ChunkObservation(before, intra, tuple(influence))


def candidate(
    named: NamedSegment, prefix: int, observation: ChunkObservation | None = None, longer: int = 0
) -> VariantCandidate:
    info = VariantInfo(tokens_of(named) + longer, 1, prefix, Provenance(exact=True))
    return VariantCandidate(VariantKey(named.segment.chunk, key(prefix)), info, observation)


def own(named: NamedSegment, observation: ChunkObservation | None = None) -> VariantCandidate:
    """The variant of just this prefix."""
    return replace(candidate(named, 0, observation), key=named.variant)


@dataclass(frozen=True)
class Case:
    segments: tuple[NamedSegment, ...]
    exact: int
    candidates: Mapping[int, Sequence[VariantCandidate]]

    def blend(self, share: float = 0.2) -> Blend:
        return select_variants(self.segments, self.exact, self.candidates, share)

    def blended(self) -> dict[int, list[VariantCandidate]]:
        """Return the fitting candidates of each segment after the exact ones, by its index."""
        fitting = {}
        for index, named in enumerate(self.segments[self.exact :], start=self.exact):
            may_blend = named.segment.action is Action.BLEND
            some = self.candidates.get(index, ()) if may_blend else ()
            fitting[index] = [c for c in some if c.info.num_tokens == tokens_of(named)]
        return fitting

    def mismatch(self, index: int, one: VariantCandidate) -> float:
        named = self.segments[index]
        if one.key == named.variant:
            return 0.0
        if one.observation is None:
            return 1.0  # it may lean on its prefix as much as any, and on none that is back
        before = [
            PrefixChunk(n.segment.chunk, tokens_of(n))
            for n in self.segments[:index]
            if n.segment.action is Action.BLEND
        ]
        return one.observation.cci * (1 - self.overlap(one.observation, before))

    @staticmethod
    def overlap(observation: ChunkObservation, before: Sequence[PrefixChunk]) -> float:
        return prefix_overlap(observation.attended, before).adjusted


attention = st.floats(0, 10)


@st.composite
def observations(draw: st.DrawFn, num_tokens: int) -> ChunkObservation:
    attended = st.tuples(st.integers(0, CHUNKS), st.integers(1, 6), attention)
    influence = draw(st.lists(attention, min_size=num_tokens, max_size=num_tokens))
    return seen(influence, *draw(st.lists(attended, max_size=4)), intra=draw(attention))


@st.composite
def cases(draw: st.DrawFn, has_own: bool = True) -> Case:
    part = st.tuples(st.integers(0, CHUNKS), st.integers(1, 6))
    parts = draw(st.lists(part, max_size=6))
    if draw(st.booleans()):  # what may only be exact, somewhere among the chunks
        parts.insert(draw(st.integers(0, len(parts))), (-1, 3))
    segments = segments_of(*parts, head=draw(st.integers(0, 3)))
    candidates = {}
    for index, named in enumerate(segments):
        some = []
        for prefix in draw(st.lists(st.integers(0, 99), max_size=3, unique=True)):
            longer = draw(st.sampled_from([0, 0, 0, 1]))
            seen_of_it = draw(st.none() | observations(tokens_of(named) + longer))
            some.append(candidate(named, prefix, seen_of_it, longer))
        if has_own and draw(st.booleans()):
            some.append(own(named, draw(st.none() | observations(tokens_of(named)))))
        if some:
            candidates[index] = some
    return Case(segments, draw(st.integers(0, len(segments))), candidates)


@given(cases())
def test_sources_are_the_leading_segments_without_gaps(case: Case) -> None:
    found = case.blend()
    leading = [n.segment for n in case.segments[: len(found.sources)]]
    assert [(s.start, s.end) for s in found.sources] == [(s.start, s.end) for s in leading]
    assert found.end == sum(source.num_tokens for source in found.sources)


@given(cases())
def test_the_exact_head_comes_from_the_exact_chain(case: Case) -> None:
    found = case.blend()
    head = case.segments[: case.exact]
    assert found.sources[: case.exact] == tuple(
        BlendSource(n.variant, n.segment.start, n.segment.end, n.segment.start) for n in head
    )
    assert found.exact_end == sum(map(tokens_of, head))
    assert found.approximate == (len(found.sources) > case.exact)


@given(cases())
def test_it_ends_with_a_stored_chunk_and_inner_gaps_are_missing(case: Case) -> None:
    found, blended = case.blend(), case.blended()
    last_stored = max((index for index, some in blended.items() if some), default=case.exact - 1)
    assert len(found.sources) == last_stored + 1
    for index, source in enumerate(found.sources[case.exact :], start=case.exact):
        assert (source.variant is None) == (not blended[index])
        if source.variant is None:
            assert (source.base_position, source.influence) == (source.start, None)
    # Chunks after the end are not stored either, although they are no source.
    not_stored = {
        case.segments[index].segment.start
        for index, some in blended.items()
        if not some and case.segments[index].segment.action is Action.BLEND
    }
    assert found.not_stored == not_stored


@given(cases())
def test_the_variant_with_the_least_mismatch_is_selected(case: Case) -> None:
    found, blended = case.blend(), case.blended()
    for index, source in enumerate(found.sources[case.exact :], start=case.exact):
        if source.variant is None:
            continue
        (taken,) = [one for one in blended[index] if one.key == source.variant]
        least = min(case.mismatch(index, one) for one in blended[index])
        assert case.mismatch(index, taken) == least
        assert source.base_position == taken.info.base_position
        assert (source.influence is None) == (least == 0)
        assert source.influence is None or len(source.influence) == source.num_tokens


@given(cases(), st.data())
def test_the_order_of_candidates_does_not_matter(case: Case, data: st.DataObject) -> None:
    indices = data.draw(st.permutations(sorted(case.candidates)))
    mixed = {index: data.draw(st.permutations(case.candidates[index])) for index in indices}
    assert replace(case, candidates=mixed).blend() == case.blend()


@given(cases())
def test_candidates_of_another_length_or_of_exact_segments_are_ignored(case: Case) -> None:
    assert replace(case, candidates=case.blended()).blend() == case.blend()


@given(cases(has_own=False), st.floats(0, 1))
def test_recompute_tokens_stay_within_the_share_of_other_prefixes(case: Case, share: float) -> None:
    found = case.blend(share)
    foreign = sum(s.num_tokens for s in found.sources[case.exact :] if s.variant is not None)
    assert 0 <= found.recompute_tokens <= share * foreign + 1e-6


@given(cases(), st.floats(0, 1), st.floats(0, 1))
def test_the_recompute_share_changes_only_the_recompute_tokens(
    case: Case, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    less, more = case.blend(low), case.blend(high)
    assert less.recompute_tokens <= more.recompute_tokens
    assert replace(less, recompute_share=0) == replace(more, recompute_share=0) == case.blend(0.0)


@given(cases())
def test_unobserved_variants_get_the_mean_influence(case: Case) -> None:
    known: list[float] = []
    unknown: list[float] = []
    for index, source in enumerate(case.blend().sources):
        if source.influence is None:
            continue
        (taken,) = [c for c in case.blended()[index] if c.key == source.variant]
        (known if taken.observation else unknown).extend(source.influence)
    usual = fmean(known) if sum(known) > 0 else 1.0
    assert unknown == [pytest.approx(usual)] * len(unknown)


@given(cases(), st.integers(0, 40), st.integers(0, 40))
def test_missing_ranges_and_influence_stay_within_the_loaded_range(
    case: Case, one: int, other: int
) -> None:
    first, end = sorted((one, other))
    found = case.blend()
    not_loaded = {p for s in found.sources if s.variant is None for p in range(s.start, s.end)}
    missing = found.missing_ranges(first, end)
    assert [p for run in missing for p in run] == sorted(not_loaded & set(range(first, end)))
    assert first == end or all(missing)
    by_position = {
        s.start + i: influence
        for s in found.sources
        for i, influence in enumerate(s.influence or ())
        if s.start + i < end
    }
    influenced = found.influenced_chunks(end)
    assert all(chunk.influence for chunk in influenced)
    assert {
        chunk.start + i: influence
        for chunk in influenced
        for i, influence in enumerate(chunk.influence)
    } == by_position


def test_a_variant_of_this_prefix_needs_no_recomputation() -> None:
    segments = segments_of((1, 4), (2, 4), head=2)
    foreign = candidate(segments[2], 7, seen([1, 1, 1, 1], (9, 4, 0.1)))
    found = select_variants(segments, 1, {2: [foreign, own(segments[2])]}, 1.0)
    # The missing chunk before it does not matter: once computed, it equals the old one.
    assert found.sources[1:] == (
        BlendSource(None, 2, 6, 2),
        BlendSource(segments[2].variant, 6, 10, 0),
    )
    assert found.recompute_tokens == 0


def test_influence_is_scaled_by_the_changed_share_of_the_prefix() -> None:
    segments = segments_of((1, 4), (2, 4), head=2)
    observation = seen([4, 0, 2, 8], (3, 4, 12.0), (1, 4, 4.0), intra=4.0)
    found = select_variants(
        segments, 2, {2: [candidate(segments[2], 50, observation)]}, 1.0, alpha=1.0
    )
    # Chunk 1 had a quarter of its attention, and three quarters are gone.
    # Attention of 1 to what was before and of 1/4 within; ceil(sigmoid(4) * 3/4 * 4).
    variant = VariantKey(key(2), key(50))
    assert found.sources[2] == BlendSource(
        variant,
        6,
        10,
        50,
        (3.0, 0.0, 1.5, 6.0),
        recompute_tokens=3,
        mismatch=observation.cci * 0.75,
    )
    assert observation.cci == pytest.approx(1 / (1 + math.exp(-4)))
    assert found.recompute_tokens == 3
    assert (
        select_variants(
            segments, 2, {2: [candidate(segments[2], 50, observation)]}, 0.5
        ).recompute_tokens
        == 2
    )


def test_the_template_is_not_a_prefix_chunk() -> None:
    segments = segments_of((1, 3), head=9)
    first_elsewhere = candidate(segments[1], 5, seen([1, 2, 3]))
    found = select_variants(segments, 1, {1: [first_elsewhere]}, 1.0)
    assert found.sources[1].influence is None
    assert found.recompute_tokens == 0


def test_unknown_influence_is_the_mean_of_the_others() -> None:
    segments = segments_of((1, 2), (2, 2), (3, 4))
    stored = {
        0: [candidate(segments[0], 5, seen([1, 3], (9, 2, 1.0)))],
        1: [candidate(segments[1], 6)],
        2: [candidate(segments[2], 7, seen([5, 5, 5, 5], (9, 2, 1.0)))],
    }
    assert [s.influence for s in select_variants(segments, 0, stored, 1.0).sources] == [
        (1.0, 3.0),
        (4.0, 4.0),
        (5.0, 5.0, 5.0, 5.0),
    ]
    alone = select_variants(segments, 0, {1: stored[1]}, 1.0)
    assert [s.influence for s in alone.sources] == [None, (1.0, 1.0)]
    assert alone.not_stored == {0, 4}


def test_an_exact_segment_that_is_not_stored_is_computed_and_chunks_after_it_are_reused() -> None:
    """Such as the date in a template: chunks after it would be missing in each request."""
    segments = segments_of((1, 2), (-1, 3), (2, 2))
    stored = {index: [own(named)] for index, named in enumerate(segments)}
    found = select_variants(segments, 0, stored, 1.0)
    assert [source.variant for source in found.sources] == [
        segments[0].variant,
        None,
        segments[2].variant,
    ]
    assert found.missing_ranges(0, 7) == (range(2, 5),)
    assert found.not_stored == frozenset(), "the part that differs is not worth storing"
    assert select_variants(segments, 2, stored, 1.0).missing_ranges(0, 7) == ()
    assert select_variants(segments[:2], 0, stored, 1.0).end == 2


@given(cases(), st.floats(0, 1), st.data())
def test_recomputed_sources_leave_the_others_unchanged(
    case: Case, share: float, data: st.DataObject
) -> None:
    found = case.blend(share)
    may_go = [source for source in found.sources if source.start >= found.exact_end]
    gone = {s.start for s in may_go if data.draw(st.booleans(), label=f"drop {s.start}")}
    less = found.with_recomputed(gone)
    assert found.with_recomputed(()) == found
    assert less.end <= found.end
    assert less.recompute_tokens <= found.recompute_tokens
    assert (less.exact_end, less.not_stored) == (found.exact_end, found.not_stored)
    for before, after in zip(found.sources, less.sources, strict=False):
        assert (after.start, after.end) == (before.start, before.end)
        if before.start in gone:
            assert (after.variant, after.influence, after.recompute_tokens) == (None, None, 0)
        else:
            assert after == before
    # Chunks after the last source are computed by the prefill and not by the recomputation.
    assert not less.sources or less.sources[-1].variant is not None
    stored = [s for s in found.sources if s.variant is not None and s.start not in gone]
    assert less.end == (stored[-1].end if stored else 0)
    assert set(less.missing_ranges(0, less.end, not_stored_only=True)) == set(
        less.missing_ranges(0, less.end)
    ) - {gap for gap in less.missing_ranges(0, less.end) if gap.start not in found.not_stored}


def test_an_empty_prompt_has_an_empty_blend() -> None:
    nothing = select_variants([], 0, {}, 1.0)
    assert (nothing.sources, nothing.end, nothing.recompute_tokens) == ((), 0, 0)
    assert not nothing.approximate
    assert nothing.influenced_chunks(5) == nothing.missing_ranges(0, 5) == ()
    not_stored = select_variants(segments_of((1, 2), (2, 2)), 0, {0: [], 1: []}, 1.0)
    assert (not_stored.sources, not_stored.not_stored) == ((), {0, 2})


def test_invalid_input_is_rejected() -> None:
    segments = segments_of((1, 2))
    with pytest.raises(ValueError, match="one influence for each token"):
        candidate(segments[0], 5, seen([1.0]))
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="recompute_share lies in"):
            select_variants(segments, 0, {}, wrong)
    with pytest.raises(ValueError, match="alpha"):
        select_variants(segments, 0, {0: [candidate(segments[0], 5)]}, 1.0, alpha=-1.0)


def test_an_approximate_variant_does_not_count_as_exact() -> None:
    [_, named] = segments = segments_of((1, 4), (2, 10))
    approximate = replace(
        own(named), info=replace(own(named).info, provenance=Provenance(exact=False))
    )
    exact_one = candidate(named, 7, seen((1.0,) * 10, (1, 4, 2.0)))
    found = select_variants(segments, 0, {1: [approximate, exact_one]}, 1.0)
    assert found.sources[1].variant == exact_one.key
    found = select_variants(segments, 0, {1: [approximate]}, 1.0)
    assert (found.sources[1].variant, found.recompute_tokens) == (approximate.key, 10)


def test_the_share_is_of_tokens_from_other_prefixes() -> None:
    first, second = segments = segments_of((1, 100), (2, 100))
    found = select_variants(segments, 0, {0: [candidate(first, 7)], 1: [own(second)]}, 0.15)
    assert found.recompute_tokens == 15


TOKENS = 50
LIMIT = 4
HEAD, LAST = b"h" * 16, b"l" * 16


def chunk(number: int) -> bytes:
    return bytes([number]) * 16


def variant(number: int, before: tuple[bytes, ...], load_s: float = 0.0) -> StoredVariant:
    key = VariantKey(LAST, bytes([number]) * 16)
    info = VariantInfo(TOKENS, 9, 1000 + number, Provenance(exact=True))
    return StoredVariant(key, info, Tier.MEMORY, load_s, before)


def prompt(*before: int, exact: int = 255) -> list[NamedSegment]:
    """Return the segments of a prompt: a template, some chunks, and the chunk LAST."""
    names = [HEAD, *(chunk(one) for one in before), LAST]
    segments = []
    for index, name in enumerate(names):
        action = Action.BLEND if index else Action.EXACT
        segment = Segment(name, index * TOKENS, (index + 1) * TOKENS, action)
        prefix = bytes([exact]) * 16 if name is LAST else bytes(16)
        segments.append(NamedSegment(segment, VariantKey(name, prefix)))
    return segments


numbers = st.lists(st.integers(1, 6), max_size=5)


@given(st.lists(numbers, min_size=1, max_size=24), numbers, st.integers(0, 24))
def test_a_cut_keeps_the_variant_that_is_selected_without_it(
    prefixes: list[list[int]], now: list[int], exact: int
) -> None:
    """Where attention follows the number of tokens, the estimate is beta' itself."""
    stored = [
        variant(number, (HEAD, *(chunk(one) for one in before)))
        for number, before in enumerate(prefixes)
    ]
    segments = prompt(*now, exact=exact)
    last = len(segments) - 1

    def mismatch(kept: list[StoredVariant]) -> float:
        candidates = [
            VariantCandidate(one.key, one.info, observe(prefixes[one.key.prefix[0]]))
            for one in kept
        ]
        return select_variants(segments, 0, {last: candidates}, 0.2).sources[last].mismatch

    kept = list(most_promising(stored, segments, last, LIMIT))
    assert len(kept) == min(LIMIT, len(stored))
    assert mismatch(kept) == pytest.approx(mismatch(stored))
    if exact < len(stored):
        assert stored[exact] in kept


def observe(before: list[int]) -> ChunkObservation:
    """Return an observation with the highest CCI for each prefix that is not empty."""
    share = 1000.0 / max(1, len(before))
    attended = tuple(AttendedChunk(chunk(one), TOKENS, share) for one in before)
    return ChunkObservation(attended, 1.0, (0.5,) * TOKENS)


@given(st.permutations(range(12)), numbers)
def test_the_order_of_the_store_does_not_matter(order: list[int], now: list[int]) -> None:
    stored = [variant(number, (HEAD, chunk(1 + number % 6))) for number in range(12)]
    segments = prompt(*now)
    last = len(segments) - 1
    kept = most_promising([stored[index] for index in order], segments, last, LIMIT)
    assert kept == most_promising(stored, segments, last, LIMIT)


def test_of_equal_prefixes_the_variant_in_the_faster_tier_is_kept() -> None:
    stored = [variant(number, (chunk(1),), load_s=10.0 - number) for number in range(9)]
    kept = most_promising(stored, prompt(1), 2, 2)
    assert [one.load_s for one in kept] == [2.0, 3.0]


def test_an_unknown_chunk_counts_as_the_mean_of_the_prompt() -> None:
    now = [PrefixChunk(chunk(1), 10), PrefixChunk(chunk(2), 30)]
    assert estimated_overlap([chunk(1), chunk(2)], now) == 1
    # 40 of 60 tokens of the old prefix are still there.
    assert estimated_overlap([chunk(1), chunk(2), chunk(9)], now) == pytest.approx(40 / 60)
    assert estimated_overlap([], now) == 0
    assert estimated_overlap([], []) == 1
    assert estimated_overlap([chunk(9)], []) == 0
