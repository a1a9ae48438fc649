"""Splits a recomputation into passes, one by one or at once, and merges runs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.blend.slices import (
    merge_runs,
    runs_outside,
    split_first_pass,
    split_into_passes,
)

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
