"""Which tokens are recomputed first: influence on them, times the question's attention."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.blend.token_ranking import InfluencedChunk, rank_tokens

influences = st.lists(st.floats(0, 1e6), max_size=30)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[InfluencedChunk], list[float]]:
    """Chunks with gaps between them, in any order, and attention for what is up to their end."""
    chunks, position = [], 0
    for influence in draw(st.lists(influences, max_size=4)):
        position += draw(st.integers(0, 5))
        chunks.append(InfluencedChunk(position, influence))
        position += len(influence)
    attention = draw(st.lists(st.floats(0, 1), min_size=position, max_size=position + 3))
    return draw(st.permutations(chunks)), attention


@given(prompts(), st.booleans())
def test_every_token_is_ranked_once(
    prompt: tuple[list[InfluencedChunk], list[float]], has_attention: bool
) -> None:
    chunks, attention = prompt
    order = rank_tokens(chunks, attention if has_attention else None)
    wanted = [c.start + i for c in chunks for i in range(len(c.influence))]
    assert sorted(order) == sorted(wanted)


@given(prompts())
def test_equal_attention_to_all_equals_no_attention(
    prompt: tuple[list[InfluencedChunk], list[float]],
) -> None:
    chunks, attention = prompt
    assert rank_tokens(chunks, [1.0] * len(attention)) == rank_tokens(chunks)


@given(prompts())
def test_tokens_are_ranked_by_need_then_by_influence(
    prompt: tuple[list[InfluencedChunk], list[float]],
) -> None:
    chunks, attention = prompt
    influence = {}
    for chunk in chunks:
        for index, own in enumerate(chunk.influence):
            before = chunk.influence[index - 1] if index else 0.0
            influence[chunk.start + index] = max(own, 0.999 * before)

    def key(position: int) -> tuple[float, float, int]:
        need = influence[position] * attention[position]
        return -need, -influence[position], position

    assert rank_tokens(chunks, attention) == sorted(influence, key=key)


@given(prompts(), st.data())
def test_more_attention_never_lowers_the_rank_of_a_token(
    prompt: tuple[list[InfluencedChunk], list[float]], data: st.DataObject
) -> None:
    chunks, attention = prompt
    before = rank_tokens(chunks, attention)
    if not before:
        return
    index = data.draw(st.sampled_from(before))
    attention[index] += data.draw(st.floats(0, 1))
    after = rank_tokens(chunks, attention)
    assert set(after[: after.index(index)]) <= set(before[: before.index(index)])


@given(prompts())
def test_without_attention_influence_decides(
    prompt: tuple[list[InfluencedChunk], list[float]],
) -> None:
    chunks, attention = prompt
    assert rank_tokens(chunks, [0.0] * len(attention)) == rank_tokens(chunks)


def test_the_next_token_gets_nearly_the_same_influence() -> None:
    assert rank_tokens([InfluencedChunk(10, [0, 5, 0, 3, 0, 0])]) == [11, 12, 13, 14, 10, 15]


def test_influence_does_not_pass_between_chunks() -> None:
    chunks = [InfluencedChunk(3, [4, 0, 2]), InfluencedChunk(0, [1, 1, 9])]
    assert rank_tokens(chunks) == [2, 3, 4, 5, 0, 1]


def test_influence_and_attention_count_alike() -> None:
    attention = [0.01] * 20
    attention[9] = 0.81
    influence = [1.0] * 19 + [10.0]
    assert rank_tokens([InfluencedChunk(0, influence)], attention)[:2] == [9, 19]
    influence[19] = 100.0
    assert rank_tokens([InfluencedChunk(0, influence)], attention)[:2] == [19, 9]


def test_invalid_input_is_rejected() -> None:
    with pytest.raises(ValueError, match="overlap"):
        rank_tokens([InfluencedChunk(0, [1, 2]), InfluencedChunk(1, [1])])
    with pytest.raises(ValueError, match="ends at 1"):
        rank_tokens([InfluencedChunk(0, [1, 2])], [1.0])
    with pytest.raises(ValueError, match="attention must be finite"):
        rank_tokens([InfluencedChunk(0, [1])], [-1.0])
    with pytest.raises(ValueError, match="start must be 0 or more"):
        InfluencedChunk(-1, [])
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="influence must be finite"):
            InfluencedChunk(0, [wrong])


def test_no_chunks_have_no_tokens() -> None:
    assert rank_tokens([]) == rank_tokens([InfluencedChunk(3, [])], []) == []
