"""Only valid segments are named, and only a gapless exact chain is served."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.identity.keys import KVSpace, PrefixHasher, VariantKey
from ragcache_core.identity.variant import Provenance, VariantInfo
from ragcache_core.plan.prompt import Prompt, assemble, plan_blend, plan_compute, plan_exact
from ragcache_core.plan.reuse_plan import Action, ReusePlan
from ragcache_core.plan.segments import NamedSegment, checked_segments, longest_exact_chain

SPACE = KVSpace("model", num_layers=2, num_kv_heads=1, head_dim=8, dtype="bfloat16")


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    ids = st.lists(st.integers(0, 99), min_size=1, max_size=6)
    return assemble(draw(ids), draw(st.lists(ids, min_size=1, max_size=5)), draw(ids))


def plan_of(prompt: Prompt) -> ReusePlan:
    return plan_exact(prompt, SPACE, "public", "request")


def named(prompt: Prompt) -> tuple[NamedSegment, ...]:
    return checked_segments(plan_of(prompt), prompt.token_ids, SPACE)


def stored(segments: tuple[NamedSegment, ...]) -> dict[VariantKey, VariantInfo]:
    return {
        n.variant: VariantInfo(
            num_tokens=n.segment.end - n.segment.start,
            num_bytes=1,
            base_position=n.segment.start,
            provenance=Provenance(exact=True),
        )
        for n in segments
    }


@given(prompts())
def test_all_segments_of_a_valid_plan_are_named_by_their_prefixes(prompt: Prompt) -> None:
    segments = named(prompt)
    assert tuple(n.segment for n in segments) == plan_of(prompt).segments
    for n in segments:
        hasher = PrefixHasher(SPACE, "public")
        hasher.extend(prompt.token_ids[: n.segment.start])
        assert n.variant == VariantKey(n.segment.chunk, hasher.key())


@given(prompts(), st.data())
def test_checking_stops_at_a_changed_token(prompt: Prompt, data: st.DataObject) -> None:
    covered = prompt.chunk_ends[-1]
    index = data.draw(st.integers(0, covered - 1))
    forged = list(prompt.token_ids)
    forged[index] += 1
    segments = checked_segments(plan_of(prompt), forged, SPACE)
    assert all(n.segment.end <= index for n in segments)
    assert segments == named(prompt)[: len(segments)]


@given(prompts())
def test_a_plan_for_another_domain_names_nothing(prompt: Prompt) -> None:
    forged = replace(plan_of(prompt), domain="other")
    assert checked_segments(forged, prompt.token_ids, SPACE) == ()


@given(prompts())
def test_a_plan_for_another_space_names_nothing(prompt: Prompt) -> None:
    other = replace(SPACE, dtype="float16")
    assert checked_segments(plan_of(prompt), prompt.token_ids, other) == ()


@given(prompts())
def test_checking_stops_at_the_end_of_the_prompt(prompt: Prompt) -> None:
    cut = prompt.token_ids[: prompt.chunk_ends[-1] - 1]
    segments = checked_segments(plan_of(prompt), cut, SPACE)
    assert segments == named(prompt)[:-1]


@given(prompts(), st.data())
def test_checking_stops_at_a_gap(prompt: Prompt, data: st.DataObject) -> None:
    plan = plan_of(prompt)
    missing = data.draw(st.integers(0, len(plan.segments) - 1))
    gapped = replace(plan, segments=plan.segments[:missing] + plan.segments[missing + 1 :])
    assert checked_segments(gapped, prompt.token_ids, SPACE) == named(prompt)[:missing]


@given(prompts())
def test_segments_to_compute_are_not_named(prompt: Prompt) -> None:
    plan = plan_compute(prompt, SPACE, "public", "request")
    assert all(segment.action is Action.COMPUTE for segment in plan.segments)
    assert checked_segments(plan, prompt.token_ids, SPACE) == ()


@given(prompts())
def test_blended_segments_are_named_like_exact_ones(prompt: Prompt) -> None:
    plan = plan_blend(prompt, SPACE, "public", "request", 0.2)
    segments = checked_segments(plan, prompt.token_ids, SPACE)
    assert tuple(n.segment for n in segments) == plan.segments
    assert [n.variant for n in segments] == [n.variant for n in named(prompt)]
    assert longest_exact_chain(segments, stored(segments)) == segments


@given(prompts(), st.data())
def test_blending_stops_at_a_changed_token(prompt: Prompt, data: st.DataObject) -> None:
    plan = plan_blend(prompt, SPACE, "public", "request", 0.2)
    index = data.draw(st.integers(0, prompt.chunk_ends[-1] - 1))
    forged = list(prompt.token_ids)
    forged[index] += 1
    segments = checked_segments(plan, forged, SPACE)
    within = [segment for segment in plan.segments if segment.end <= index]
    assert [n.segment for n in segments] == within


@given(prompts(), st.data())
def test_blending_stops_at_a_segment_to_compute(prompt: Prompt, data: st.DataObject) -> None:
    plan = plan_blend(prompt, SPACE, "public", "request", 0.2)
    index = data.draw(st.integers(0, len(plan.segments) - 1))
    computed = replace(plan.segments[index], action=Action.COMPUTE)
    mixed = (*plan.segments[:index], computed, *plan.segments[index + 1 :])
    segments = checked_segments(replace(plan, segments=mixed), prompt.token_ids, SPACE)
    assert tuple(n.segment for n in segments) == plan.segments[:index]


@given(prompts())
def test_a_store_with_all_variants_serves_the_full_chain(prompt: Prompt) -> None:
    segments = named(prompt)
    assert longest_exact_chain(segments, stored(segments)) == segments


@given(prompts(), st.data())
def test_a_missing_variant_ends_the_chain(prompt: Prompt, data: st.DataObject) -> None:
    segments = named(prompt)
    missing = data.draw(st.integers(0, len(segments) - 1))
    infos = stored(segments)
    del infos[segments[missing].variant]
    assert longest_exact_chain(segments, infos) == segments[:missing]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda info: replace(info, provenance=Provenance(exact=False)),
        lambda info: replace(info, num_tokens=info.num_tokens + 1),
        lambda info: replace(info, base_position=info.base_position + 1),
    ],
    ids=["approximate", "another length", "another position"],
)
def test_a_variant_that_does_not_fit_ends_the_chain(spoil: object) -> None:
    segments = named(assemble([1, 2], [[3], [4, 5]], [6]))
    infos = stored(segments)
    infos[segments[1].variant] = spoil(infos[segments[1].variant])  # type: ignore[operator]
    assert longest_exact_chain(segments, infos) == segments[:1]
