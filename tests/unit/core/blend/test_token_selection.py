"""Which tokens are recomputed: the first of an order, within one budget, outside the exact head."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.blend.token_selection import (
    InfluencedChunk,
    TokenSelection,
    merge_runs,
    rank_tokens,
    runs_outside,
    select_tokens,
    share_to_tokens,
    split_first_pass,
    split_into_passes,
    wanted_tokens,
)

shares = st.floats(0, 1)
budgets = st.integers(0, 90)


class TestWantedTokens:
    def test_it_rounds_up(self) -> None:
        assert wanted_tokens(0.3, 256) == 77  # 76.8
        assert wanted_tokens(0.001, 10) == 1

    def test_float_noise_does_not_round_up(self) -> None:
        assert 0.07 * 100 > 7
        assert wanted_tokens(0.07, 100) == 7
        assert 0.29 * 100 < 29
        assert share_to_tokens(0.29, 100) == 29

    def test_ends(self) -> None:
        assert [wanted_tokens(share, 9) for share in (0.0, 1.0)] == [0, 9]
        assert [share_to_tokens(share, 9) for share in (0.0, 1.0)] == [0, 9]
        assert wanted_tokens(1.0, 0) == share_to_tokens(1.0, 0) == 0

    @given(shares, shares, st.integers(0, 10_000))
    def test_a_higher_share_never_has_fewer(self, one: float, other: float, tokens: int) -> None:
        low, high = sorted((one, other))
        assert 0 <= wanted_tokens(low, tokens) <= wanted_tokens(high, tokens) <= tokens
        assert 0 <= share_to_tokens(low, tokens) <= share_to_tokens(high, tokens) <= tokens
        assert share_to_tokens(low, tokens) <= wanted_tokens(low, tokens)

    @pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
    def test_a_share_outside_0_to_1_is_refused(self, share: float) -> None:
        with pytest.raises(ValueError, match="lies in"):
            wanted_tokens(share, 10)
        with pytest.raises(ValueError, match="lies in"):
            share_to_tokens(share, 10)


@given(st.permutations(range(20)), st.integers(0, 25), st.integers(0, 25))
def test_the_first_of_an_order_are_selected(order: list[int], budget: int, head: int) -> None:
    wanted = sorted([p for p in order if p >= head][:budget])
    found = select_tokens(order, budget, exact_head=head)
    assert found.positions() == wanted
    assert all(b.start > a.stop for a, b in pairwise(found.runs))


@given(st.permutations(range(20)), st.integers(0, 25), st.integers(0, 25), st.data())
def test_tokens_that_are_recomputed_anyway_are_skipped(
    order: list[int], first: int, then: int, data: st.DataObject
) -> None:
    already = select_tokens(order, first)
    again = data.draw(st.permutations(order))
    found = select_tokens(again, then, already_selected=already.runs)
    left = [position for position in again if position not in already.positions()]
    assert found.positions() == sorted(left[:then])


@st.composite
def orders(draw: st.DrawFn) -> tuple[list[int], int, list[range]]:
    """Tokens of chunks with gaps between them in any order, an exact head, selected runs."""
    positions: list[int] = []
    position = 0
    for length in draw(st.lists(st.integers(1, 30), max_size=4)):
        position += draw(st.integers(0, 3))
        positions += range(position, position + length)
        position += length
    ends = st.integers(0, position)
    already = [range(*sorted((draw(ends), draw(ends)))) for _ in range(draw(st.integers(0, 2)))]
    return draw(st.permutations(positions)), draw(st.integers(0, 20)), already


def eligible(order: list[int], head: int, already: list[range]) -> set[int]:
    return {p for p in order if p >= head and not any(p in run for run in already)}


@given(orders(), budgets)
def test_a_budget_is_spent_to_the_token_on_eligible_positions(
    given_order: tuple[list[int], int, list[range]], budget: int
) -> None:
    order, head, already = given_order
    may_be_selected = eligible(order, head, already)
    found = select_tokens(order, budget, exact_head=head, already_selected=already)
    assert may_be_selected.issuperset(found.positions())
    assert len(found.positions()) == found.num_tokens == min(budget, len(may_be_selected))
    assert all(b.start > a.stop for a, b in pairwise(found.runs))


@given(orders(), budgets, budgets)
def test_a_larger_budget_never_drops_a_token(
    given_order: tuple[list[int], int, list[range]], one: int, other: int
) -> None:
    order, head, already = given_order
    fewer, more = (
        set(select_tokens(order, budget, exact_head=head, already_selected=already).positions())
        for budget in sorted((one, other))
    )
    assert fewer <= more


def test_an_empty_order_or_budget_selects_nothing() -> None:
    assert select_tokens([], 5) == select_tokens([3], 0) == TokenSelection(())


@pytest.mark.parametrize(("budget", "head"), [(-1, 0), (1, -1)])
def test_a_negative_budget_or_head_is_refused(budget: int, head: int) -> None:
    with pytest.raises(ValueError, match="0 tokens or more"):
        select_tokens([1], budget, exact_head=head)


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


LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), max_size=20)
"""Of the gap before a run, and of the run."""

OVERLAPPING = st.lists(
    st.builds(lambda start, length: range(start, start + length), *[st.integers(0, 30)] * 2),
    max_size=12,
)
"""Runs in any order, some of them empty."""


def runs_of(lengths: list[tuple[int, int]]) -> list[range]:
    runs, position = [], 0
    for gap, length in lengths:
        runs.append(range(position + gap, position + gap + length))
        position = runs[-1].stop
    return runs


@given(LENGTHS, st.integers(1, 50), st.integers(1, 8))
def test_passes_cover_all_positions_in_order_within_their_bounds(
    lengths: list[tuple[int, int]], max_tokens: int, max_runs: int
) -> None:
    runs = runs_of(lengths)
    passes = list(split_into_passes(runs, max_tokens=max_tokens, max_runs=max_runs))
    positions = [position for one in passes for run in one for position in run]
    assert positions == [position for run in runs for position in run]
    for number, one in enumerate(passes):
        tokens = sum(len(run) for run in one)
        assert all(len(run) for run in one)
        assert 1 <= len(one) <= max_runs
        assert tokens <= max_tokens
        if number < len(passes) - 1:  # as full as it can be
            assert tokens == max_tokens or len(one) == max_runs


def test_a_run_is_cut_only_where_a_pass_is_full() -> None:
    runs = [range(10, 14), range(20, 29), range(40, 41)]
    assert list(split_into_passes(runs, max_tokens=6, max_runs=2)) == [
        (range(10, 14), range(20, 22)),
        (range(22, 28),),
        (range(28, 29), range(40, 41)),
    ]


def test_no_runs_make_no_pass() -> None:
    assert list(split_into_passes([], max_tokens=1, max_runs=1)) == []


@pytest.mark.parametrize(("max_tokens", "max_runs"), [(0, 1), (1, 0)])
def test_a_pass_without_room_is_rejected(max_tokens: int, max_runs: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        list(split_into_passes([range(3)], max_tokens=max_tokens, max_runs=max_runs))
    with pytest.raises(ValueError, match="at least 1"):
        split_first_pass([], max_tokens=max_tokens, max_runs=max_runs)


@given(LENGTHS, st.integers(1, 50), st.integers(1, 8))
def test_splitting_one_by_one_gives_the_same_passes(
    lengths: list[tuple[int, int]], max_tokens: int, max_runs: int
) -> None:
    left = tuple(runs_of(lengths))
    all_runs, passes = left, []
    while left:
        before = left
        taken, left = split_first_pass(before, max_tokens=max_tokens, max_runs=max_runs)
        assert merge_runs([*taken, *left]) == before
        assert all((*taken, *left))
        assert 1 <= len(taken) <= max_runs
        assert 1 <= sum(map(len, taken)) <= max_tokens
        passes.append(taken)
    assert [p for one in passes for run in one for p in run] == [p for run in all_runs for p in run]
    assert passes == list(split_into_passes(all_runs, max_tokens=max_tokens, max_runs=max_runs))


def test_the_rest_begins_where_the_pass_ends() -> None:
    runs = [range(10, 14), range(20, 29)]
    assert split_first_pass(runs, max_tokens=4, max_runs=9) == ((range(10, 14),), (range(20, 29),))
    assert split_first_pass(runs, max_tokens=5, max_runs=9)[1] == (range(21, 29),)
    assert split_first_pass(runs, max_tokens=99, max_runs=1)[1] == (range(20, 29),)
    assert split_first_pass(runs, max_tokens=13, max_runs=2) == (tuple(runs), ())
    assert split_first_pass([], max_tokens=1, max_runs=1) == ((), ())


@given(OVERLAPPING)
def test_merged_runs_are_all_positions_as_maximal_runs(runs: list[range]) -> None:
    joined = merge_runs(runs)
    assert [p for run in joined for p in run] == sorted({p for run in runs for p in run})
    assert all(joined)
    assert all(b.start > a.stop for a, b in pairwise(joined))


@given(LENGTHS)
def test_disjoint_runs_stay_unchanged(lengths: list[tuple[int, int]]) -> None:
    runs = runs_of(lengths)
    assert merge_runs(runs[::-1]) == tuple(runs)


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_runs_outside_of_others_are_the_difference_of_their_positions(
    positions: set[int], excluded: set[int]
) -> None:
    def runs(chosen: set[int]) -> tuple[range, ...]:
        return merge_runs([range(p, p + 1) for p in sorted(chosen)])

    left = runs_outside(runs(positions), runs(excluded))
    assert left == runs(positions - excluded)
