"""Requests of a sequence, their plans, and the prompts that compute passages ahead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.support.sequences.requests import (
    Part,
    PromptPart,
    SequenceRequest,
    Vocabulary,
    ahead_prompts,
    plan_request,
)
from ragcache_core.identity.keys import KVSpace
from ragcache_core.plan.reuse_plan import Action
from ragcache_core.plan.segments import checked_segments

SPACE = KVSpace("model", num_layers=2, num_kv_heads=1, head_dim=8, dtype="bfloat16")
WORDS = Vocabulary(10_000, seed=1)


def part(role: Part, name: str, length: int = 10) -> PromptPart:
    return PromptPart(name, role, WORDS.draw(name, length))


def request(*passages: str, number: int = 0) -> SequenceRequest:
    return SequenceRequest(
        (
            part(Part.STABLE, "system"),
            part(Part.STABLE, "tools"),
            part(Part.CHANGING, f"session {number}"),
            *(part(Part.PASSAGE, name) for name in passages),
            part(Part.TAIL, f"question {number}"),
        )
    )


def test_a_plan_has_one_segment_for_each_part_of_the_head_and_one_for_each_passage() -> None:
    plan = plan_request(request("a", "b"), SPACE, "public", "r", 0.15)
    assert [(s.start, s.end, s.action) for s in plan.segments] == [
        (0, 20, Action.EXACT),
        (20, 30, Action.EXACT),
        (30, 40, Action.BLEND),
        (40, 50, Action.BLEND),
    ]
    assert plan.recompute_share == 0.15


def test_an_exact_plan_blends_nothing() -> None:
    assert not plan_request(request("a"), SPACE, "public", "r", None).blends


@given(st.lists(st.sampled_from("abcdef"), max_size=6), st.booleans())
def test_an_engine_accepts_every_segment(passages: list[str], blend: bool) -> None:
    asked = request(*passages)
    plan = plan_request(asked, SPACE, "public", "r", 0.15 if blend else None)
    assert len(checked_segments(plan, asked.token_ids, SPACE)) == 2 + len(passages)


def test_parts_in_another_order_are_refused() -> None:
    with pytest.raises(ValueError, match="order"):
        SequenceRequest((part(Part.PASSAGE, "a"), part(Part.STABLE, "system")))


@given(st.text(max_size=8), st.integers(0, 40), st.integers(0, 40))
def test_a_shorter_draw_is_a_prefix_of_a_longer_one(name: str, one: int, other: int) -> None:
    short, long = sorted((one, other))
    assert WORDS.draw(name, long)[:short] == WORDS.draw(name, short)


def test_different_names_draw_different_tokens() -> None:
    assert WORDS.draw("a", 10) != WORDS.draw("b", 10)
    assert all(100 <= token < 9_900 for token in WORDS.draw("a", 1000))


def test_prompts_ahead_have_the_stable_head_context_and_neighbouring_passages() -> None:
    requests = [request("a", "b", "c", number=0), request("d", "e", "a", number=1)]
    prompts = ahead_prompts(requests, ["e", "unknown", "d", "c", "b", "a"], 30)
    assert [[p.name for p in prompt.parts] for prompt in prompts] == [
        ["system", "tools", "e", "d", "c", "e", "d"],
        ["system", "tools", "e", "d", "b", "a"],
    ]


@given(st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1), st.integers(1, 60))
def test_prompts_ahead_compute_every_passage(passages: list[str], max_tokens: int) -> None:
    prompts = ahead_prompts([request(*passages)], "abcdefgh", max_tokens)
    computed = {passage.name for prompt in prompts for passage in prompt.passages}
    assert computed == set(passages)


def test_without_passages_nothing_is_computed_ahead() -> None:
    assert ahead_prompts([request()], ["a"]) == []
