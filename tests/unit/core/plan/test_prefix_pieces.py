"""Prompts without a plan are cut by length, and their pieces are named by content."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import KVSpace
from ragcache_core.plan.prompt import assemble, plan_exact
from ragcache_core.plan.reuse_plan import DOMAIN_MAX_CHARS, Action, ReusePlan, Segment
from ragcache_core.plan.segments import (
    PIECE_TOKENS,
    blended_pieces,
    checked_segments,
    handoff_segments,
    plain_domain,
    prefix_pieces,
)

SPACE = KVSpace("model", num_layers=2, num_kv_heads=1, head_dim=4, dtype="bfloat16")
token_ids = st.lists(st.integers(0, 3), max_size=3 * PIECE_TOKENS + 9)
salts = st.none() | st.text(min_size=1)


@given(token_ids)
def test_pieces_are_full_and_contiguous_from_the_start(ids: list[int]) -> None:
    pieces = prefix_pieces(SPACE, "d", ids)
    assert len(pieces) == len(ids) // PIECE_TOKENS
    for index, named in enumerate(pieces):
        assert named.segment.start == index * PIECE_TOKENS
        assert named.segment.end == named.segment.start + PIECE_TOKENS


@given(token_ids)
def test_pieces_have_the_same_names_as_in_a_plan(ids: list[int]) -> None:
    pieces = prefix_pieces(SPACE, "d", ids)
    plan = ReusePlan("r", "d", tuple(named.segment for named in pieces))
    assert checked_segments(plan, ids, SPACE) == pieces


@given(token_ids, token_ids)
def test_prompts_share_exactly_the_pieces_of_their_common_prefix(
    ids: list[int], others: list[int]
) -> None:
    common = next(
        (n for n, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b),
        min(len(ids), len(others)),
    )
    names = [named.variant for named in prefix_pieces(SPACE, "d", ids)]
    other_names = [named.variant for named in prefix_pieces(SPACE, "d", others)]
    num_shared = common // PIECE_TOKENS
    assert names[:num_shared] == other_names[:num_shared]
    assert not set(names[num_shared:]) & set(other_names)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=2 * PIECE_TOKENS + 9), st.data())
def test_a_handoff_covers_all_but_the_last_token(ids: list[int], data: st.DataObject) -> None:
    ends = sorted(data.draw(st.sets(st.integers(1, len(ids)), max_size=4)))
    prompt = assemble((), [ids[a:b] for a, b in itertools.pairwise([0, *ends])], ())
    own = checked_segments(plan_exact(prompt, SPACE, "d", "r"), ids, SPACE)
    segments = handoff_segments(SPACE, "d", ids, own)
    assert segments[: len(own)] == own
    position = 0
    for named in segments:
        assert named.segment.start == position
        position = named.segment.end
    assert position == max(len(ids) - 1, ends[-1] if ends else 0)
    assert all(n.segment.end - n.segment.start <= PIECE_TOKENS for n in segments[len(own) :])
    plan = ReusePlan("r", "d", tuple(named.segment for named in segments))
    assert checked_segments(plan, ids, SPACE) == segments


@given(st.integers(2, 4 * PIECE_TOKENS), st.sampled_from(["r", "s"]))
def test_pieces_of_a_blend_cover_all_but_the_last_token_of_one_request(
    length: int, request: str
) -> None:
    segments = (Segment(bytes(16), 0, length - 1, Action.BLEND),)
    plan = ReusePlan(request, "d", segments)
    pieces = blended_pieces(plan, length)
    starts = [one.segment.start for one in pieces]
    assert starts == list(range(0, length - 1, PIECE_TOKENS))
    assert [one.segment.end for one in pieces] == [*starts[1:], length - 1]
    names = {one.variant for one in pieces}
    others = (replace(plan, request="other"), replace(plan, domain="other"))
    assert not names & {one.variant for other in others for one in blended_pieces(other, length)}
    exact = replace(plan, segments=(replace(segments[0], action=Action.EXACT),))
    assert blended_pieces(exact, length) == ()


@given(salts, salts)
def test_each_salt_has_its_own_domain(salt: str | None, other: str | None) -> None:
    assert (plain_domain(salt) == plain_domain(other)) == (salt == other)
    assert len(plain_domain(salt)) <= DOMAIN_MAX_CHARS


@given(salts)
def test_no_plan_may_name_the_domain_of_clients_without_one(salt: str | None) -> None:
    plan = ReusePlan("r", plain_domain(salt), ()).encode()
    with pytest.raises(InvalidInput, match="domain"):
        ReusePlan.decode(plan)


def test_a_salt_that_is_not_valid_utf8_has_a_domain() -> None:
    assert plain_domain("\ud800") != plain_domain(None)
