"""Segments cover a prompt without gaps, and chunks keep their ids at any position."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.access.reader import may_use, reader_of
from ragcache_core.identity.keys import KVSpace
from ragcache_core.identity.variant import Influence
from ragcache_core.plan.prompt import assemble, plan_blend, plan_compute, plan_exact
from ragcache_core.plan.reuse_plan import Action, ReusePlan

SPACE = KVSpace("model", num_layers=2, num_kv_heads=1, head_dim=8, dtype="bfloat16")
ids = st.lists(st.integers(0, 99), max_size=8)
chunk_ids = st.lists(st.integers(0, 99), min_size=1, max_size=8)


@given(ids, st.lists(ids, max_size=5), ids)
def test_a_prompt_is_its_parts_in_order(
    head: list[int], chunks: list[list[int]], tail: list[int]
) -> None:
    prompt = assemble(head, chunks, tail)
    assert list(prompt.token_ids) == head + list(itertools.chain(*chunks)) + tail
    bounds = itertools.pairwise([prompt.head, *prompt.chunk_ends])
    assert [list(prompt.token_ids[start:end]) for start, end in bounds] == chunks


@given(ids, st.lists(ids, max_size=5), ids)
def test_the_plan_covers_head_and_chunks_and_not_the_tail(
    head: list[int], chunks: list[list[int]], tail: list[int]
) -> None:
    prompt = assemble(head, chunks, tail)
    plan = plan_exact(prompt, SPACE, "public", "request")
    position = 0
    for segment in plan.segments:
        assert segment.start == position < segment.end
        assert segment.action is Action.EXACT
        position = segment.end
    assert position == len(prompt.token_ids) - len(tail)


def test_every_chunk_names_its_document() -> None:
    prompt = assemble([1], [[2], [], [3]], [4])
    plan = plan_exact(prompt, SPACE, "public", "request", ["c/a", "c/empty", "c/b"])
    assert [segment.document for segment in plan.segments] == ["", "c/a", "c/b"]
    headless = plan_exact(assemble([], [[2]], []), SPACE, "public", "request", ["c/a"])
    assert [segment.document for segment in headless.segments] == ["c/a"]
    assert {s.document for s in plan_exact(prompt, SPACE, "public", "r").segments} == {""}


def test_chunks_of_the_caller_serve_others_only_with_all_that_stood_before_them() -> None:
    """What another key wrote before a chunk may not come into a prompt without it."""
    prompt = replace(assemble([1], [[2], [3]], [4]), own_head=False, own_chunks=True)
    for plan in (
        plan_exact(prompt, SPACE, "public", "r"),
        plan_blend(prompt, SPACE, "public", "r", 0.2),
    ):
        assert plan.own_head
        head, first, second = (one.chunk for one in plan.segments)
        writer, other = reader_of("writer", (), None), reader_of("other", (), None)
        influence = Influence(writer.rights, writer.key, plan.num_head)
        asked = [(other, [head, second]), (other, [head, first, second]), (writer, [head, second])]
        may = [may_use(who, on, influence, [head, first], is_exact=True) for who, on in asked]
        assert may == [False, True, True]


@pytest.mark.parametrize(("stable_head", "num_exact"), [(2, 1), (3, 0)])
def test_nothing_after_a_head_that_comes_once_is_stored(stable_head: int, num_exact: int) -> None:
    prompt = replace(assemble([1, 2, 3], [[4], [5]], [6], stable_head), comes_once=True)
    actions = [one.action for one in plan_exact(prompt, SPACE, "public", "r").segments]
    assert actions == [Action.EXACT] * num_exact + [Action.COMPUTE] * (len(actions) - num_exact)
    blend = plan_blend(prompt, SPACE, "public", "r", 0.2).segments
    assert Action.COMPUTE not in {one.action for one in blend}, "chunks are reused after any head"


@given(ids, st.lists(ids, max_size=5), ids)
def test_the_engine_can_parse_every_exact_plan(
    head: list[int], chunks: list[list[int]], tail: list[int]
) -> None:
    plan = plan_exact(assemble(head, chunks, tail), SPACE, "public", "request")
    assert ReusePlan.decode(plan.encode()) == plan


@given(ids, st.lists(chunk_ids, min_size=1, max_size=5), ids, st.randoms())
def test_chunk_keys_do_not_depend_on_rank(
    head: list[int], chunks: list[list[int]], tail: list[int], random: object
) -> None:
    shuffled = list(chunks)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first = 1 if head else 0

    def keys(ordered: list[list[int]]) -> list[bytes]:
        plan = plan_exact(assemble(head, ordered, tail), SPACE, "public", "request")
        return [segment.chunk for segment in plan.segments[first:]]

    assert sorted(keys(shuffled)) == sorted(keys(chunks))


@given(ids, st.lists(ids, max_size=5), ids)
def test_a_compute_plan_has_the_same_segments(
    head: list[int], chunks: list[list[int]], tail: list[int]
) -> None:
    prompt = assemble(head, chunks, tail)
    exact = plan_exact(prompt, SPACE, "public", "request").segments
    compute = plan_compute(prompt, SPACE, "public", "request").segments
    assert [(s.chunk, s.start, s.end) for s in exact] == [
        (s.chunk, s.start, s.end) for s in compute
    ]
    assert all(segment.action is Action.COMPUTE for segment in compute)


@given(ids, st.lists(ids, max_size=5), ids, st.floats(0, 1))
def test_a_blended_plan_differs_from_an_exact_one_only_in_chunks_and_share(
    head: list[int], chunks: list[list[int]], tail: list[int], share: float
) -> None:
    prompt = assemble(head, chunks, tail)
    documents = [f"c/{number}" for number in range(len(chunks))]
    exact = plan_exact(prompt, SPACE, "public", "request", documents)
    plan = plan_blend(prompt, SPACE, "public", "request", share, documents)
    assert plan.recompute_share == share
    assert plan.blends == any(chunks)
    assert [s.action for s in plan.segments if s.start < len(head)] == [Action.EXACT] * bool(head)
    assert {s.action for s in plan.segments if s.start >= len(head)} <= {Action.BLEND}
    as_exact = tuple(replace(s, action=Action.EXACT) for s in plan.segments)
    assert replace(plan, segments=as_exact, recompute_share=0.0) == exact


@given(ids, st.lists(ids, max_size=5), ids, st.floats(0, 1))
def test_the_engine_can_parse_every_blended_plan(
    head: list[int], chunks: list[list[int]], tail: list[int], share: float
) -> None:
    plan = plan_blend(assemble(head, chunks, tail), SPACE, "public", "request", share)
    assert ReusePlan.decode(plan.encode()) == plan


@pytest.mark.parametrize("make", [plan_exact, partial(plan_blend, recompute_share=0.15)])
def test_a_head_with_a_stable_part_is_two_segments(make: Callable[..., ReusePlan]) -> None:
    whole = make(assemble([1, 2, 3], [[4, 5]], [6]), SPACE, "public", "request")
    split = make(assemble([1, 2, 3], [[4, 5]], [6], 2), SPACE, "public", "request")
    assert [(s.start, s.end) for s in whole.segments] == [(0, 3), (3, 5)]
    assert [(s.start, s.end) for s in split.segments] == [(0, 2), (2, 3), (3, 5)]
    assert [s.action for s in split.segments[:2]] == [Action.EXACT] * 2
    assert split.segments[-1].chunk == whole.segments[-1].chunk
