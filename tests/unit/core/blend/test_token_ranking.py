"""Which tokens need recomputing first: influence on them, and the question's regard for them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.blend.token_ranking import AFTER, BEFORE, InfluencedChunk, rank_tokens

influences = st.lists(st.floats(0, 1e6), max_size=30)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[InfluencedChunk], list[float]]:
    """Chunks with gaps between them, in any order, and regard for what is up to their end."""
    chunks, position = [], 0
    for influence in draw(st.lists(influences, max_size=4)):
        position += draw(st.integers(0, 5))
        chunks.append(InfluencedChunk(position, influence))
        position += len(influence)
    regard = draw(st.lists(st.floats(0, 1), min_size=position, max_size=position + 3))
    return draw(st.permutations(chunks)), regard


@given(prompts(), st.booleans())
def test_every_token_comes_up_once(
    prompt: tuple[list[InfluencedChunk], list[float]], is_regarded: bool
) -> None:
    chunks, regard = prompt
    order = rank_tokens(chunks, regard if is_regarded else None)
    wanted = [c.start + i for c in chunks for i in range(len(c.influence))]
    assert sorted(order) == sorted(wanted)


@given(prompts())
def test_equal_regard_for_all_is_as_none(
    prompt: tuple[list[InfluencedChunk], list[float]],
) -> None:
    chunks, regard = prompt
    assert rank_tokens(chunks, [1.0] * len(regard)) == rank_tokens(chunks)


@given(prompts())
def test_order_is_by_both_and_then_by_influence(
    prompt: tuple[list[InfluencedChunk], list[float]],
) -> None:
    chunks, regard = prompt
    influence = {}
    for chunk in chunks:
        for place, own in enumerate(chunk.influence):
            before = chunk.influence[place - 1] if place else 0.0
            influence[chunk.start + place] = max(own, 0.999 * before)

    def key(position: int) -> tuple[float, float, int]:
        around = regard[max(0, position - AFTER) : position + BEFORE + 1]
        both = influence[position] * math.sqrt(max(around))
        return -both, -influence[position], position

    assert rank_tokens(chunks, regard) == sorted(influence, key=key)


@given(prompts(), st.data())
def test_more_regard_never_puts_a_token_back(
    prompt: tuple[list[InfluencedChunk], list[float]], data: st.DataObject
) -> None:
    chunks, regard = prompt
    before = rank_tokens(chunks, regard)
    if not before:
        return
    place = data.draw(st.sampled_from(before))
    regard[place] += data.draw(st.floats(0, 1))
    after = rank_tokens(chunks, regard)
    # Its neighbours are looked at, too, and may come to stand before it: of others none does.
    near = range(place - BEFORE, place + AFTER + 1)
    ahead = set(after[: after.index(place)]) - set(before[: before.index(place)])
    assert all(position in near for position in ahead)


@given(prompts())
def test_without_any_regard_influence_decides(
    prompt: tuple[list[InfluencedChunk], list[float]],
) -> None:
    chunks, regard = prompt
    assert rank_tokens(chunks, [0.0] * len(regard)) == rank_tokens(chunks)


def test_the_next_token_is_drawn_along() -> None:
    assert rank_tokens([InfluencedChunk(10, [0, 5, 0, 3, 0, 0])]) == [11, 12, 13, 14, 10, 15]


def test_chunks_are_one_order_and_do_not_draw_each_other_along() -> None:
    chunks = [InfluencedChunk(3, [4, 0, 2]), InfluencedChunk(0, [1, 1, 9])]
    assert rank_tokens(chunks) == [2, 3, 4, 5, 0, 1]


def test_what_the_question_looks_at_comes_first() -> None:
    influence = [1.0] * 20
    regard = [0.01] * 20
    regard[9] = 0.81
    near = list(range(9 - BEFORE, 9 + AFTER + 1))
    order = rank_tokens([InfluencedChunk(0, influence)], regard)
    assert order[: len(near) + 1] == [*near, 0]
    # Ten times the influence outweighs eighty times the regard.
    influence[19] = 10.0
    assert rank_tokens([InfluencedChunk(0, influence)], regard)[:2] == [19, near[0]]


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        rank_tokens([InfluencedChunk(0, [1, 2]), InfluencedChunk(1, [1])])
    with pytest.raises(ValueError, match="ends at 1"):
        rank_tokens([InfluencedChunk(0, [1, 2])], [1.0])
    with pytest.raises(ValueError, match="regard is finite"):
        rank_tokens([InfluencedChunk(0, [1])], [-1.0])
    with pytest.raises(ValueError, match="0 or later"):
        InfluencedChunk(-1, [])
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="influence is finite"):
            InfluencedChunk(0, [wrong])


def test_no_chunks_have_no_tokens() -> None:
    assert rank_tokens([]) == rank_tokens([InfluencedChunk(3, [])], []) == []
