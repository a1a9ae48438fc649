"""Algorithm 1: which chunks the question attends to, layer after layer."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.support.cache_craft import FocusedChunks, largest_gap_cut

descending = st.lists(st.floats(0, 1e3), max_size=10).map(lambda each: sorted(each, reverse=True))


@st.composite
def layers(draw: st.DrawFn) -> list[list[float]]:
    chunks = draw(st.integers(0, 6))
    attention = st.lists(st.floats(0, 10), min_size=chunks, max_size=chunks)
    return draw(st.lists(attention, min_size=1, max_size=12))


def after(attention: list[list[float]], window: int) -> FocusedChunks:
    state = FocusedChunks.at_start(len(attention[0]), window=window)
    for layer in attention:
        state = state.after_layer(layer)
    return state


class TestCuts:
    @given(scores=descending)
    def test_one_or_more_chunks_are_high(self, scores: list[float]) -> None:
        assert min(1, len(scores)) <= largest_gap_cut(scores) <= len(scores)

    @pytest.mark.parametrize("scores", [[], [3.0], [0.0, 0.0, 0.0], [2.0] * 5])
    def test_equal_scores_are_all_high(self, scores: list[float]) -> None:
        assert largest_gap_cut(scores) == len(scores)

    @given(scores=descending, power=st.integers(-4, 4))
    def test_only_ratios_of_scores_count(self, scores: list[float], power: int) -> None:
        kept = [score for score in scores if score > 1e-3]
        assert largest_gap_cut([score * 2.0**power for score in kept]) == largest_gap_cut(kept)

    def test_the_largest_gap_splits(self) -> None:
        assert largest_gap_cut([10.0, 9.0, 1.0, 0.8, 0.6]) == 2
        assert largest_gap_cut([10.0, 9.0, 8.0, 1.0, 0.5]) == 3
        assert largest_gap_cut([9.0, 1.0]) == 1

    def test_chunks_with_similar_attention_stay_together(self) -> None:
        assert largest_gap_cut([10.0, 9.9]) == 2
        assert largest_gap_cut([10.0, 7.0, 6.0]) == 3
        assert largest_gap_cut([10.0, 7.0, 6.0], most=0.7) == 1

    def test_a_chunk_without_attention_is_low(self) -> None:
        assert largest_gap_cut([1.0, 0.0], most=0.0) == 1


class TestLayers:
    def test_a_cut_that_stays_for_a_window_settles(self) -> None:
        state = FocusedChunks.at_start(3, window=2)
        state = state.after_layer([1.0, 9.0, 1.0])
        assert (state.cutoff, state.focused) == (None, {0, 1, 2})
        state = state.after_layer([1.0, 9.0, 1.0])
        assert (state.cutoff, state.focused) == (2, {1})

    def test_a_window_of_one_settles_at_once(self) -> None:
        assert after([[9.0, 1.0, 1.0]], window=1).cutoff == 1

    def test_a_cut_that_moves_starts_the_window_again(self) -> None:
        state = after([[9, 1, 1], [1, 90, 1], [1, 90, 1], [1, 90, 1]], window=3)
        assert (state.cutoff, state.focused) == (4, {1})

    def test_attention_is_summed_over_layers(self) -> None:
        # in the last layer alone chunk 0 is ahead; summed up (eq. 15) chunk 1 still is
        state = after([[1, 40, 1], [1, 40, 1], [30, 1, 1]], window=3)
        assert state.attention == (32, 81, 3)
        assert (state.cutoff, state.focused) == (3, {1})

    def test_a_split_that_never_settles_keeps_all_chunks(self) -> None:
        state = after([[9, 1, 1], [1, 90, 1]], window=2)
        assert (state.cutoff, state.focused) == (None, {0, 1, 2})

    def test_no_chunks_and_one(self) -> None:
        assert after([[], []], window=2).focused == frozenset()
        assert after([[1.0], [1.0]], window=2).focused == {0}

    def test_once_settled_later_layers_change_nothing(self) -> None:
        state = after([[9.0, 1.0, 1.0]], window=1)
        assert state.after_layer([0.0, 100.0, 0.0]) is state

    def test_a_state_is_a_value(self) -> None:
        state = FocusedChunks.at_start(2, window=1)
        state.after_layer([9.0, 1.0])
        assert state == FocusedChunks.at_start(2, window=1)
        with pytest.raises(FrozenInstanceError):
            state.window = 2  # type: ignore[misc]

    @given(layers(), st.integers(1, 4))
    def test_focused_chunks_only_become_fewer_and_then_stay(
        self, attention: list[list[float]], window: int
    ) -> None:
        state = FocusedChunks.at_start(len(attention[0]), window=window)
        for number, layer in enumerate(attention, start=1):
            then, state = state, state.after_layer(layer)
            assert state.focused <= then.focused
            assert state.cutoff is None or window <= state.cutoff <= number
            assert then.cutoff is None or state == then

    @given(layers(), st.integers(1, 4))
    def test_it_is_algorithm_1(self, attention: list[list[float]], window: int) -> None:
        """Lines 1 to 14 as a loop over all layers."""
        total = [0.0] * len(attention[0])
        sets: list[set[int]] = []
        found: tuple[set[int], int] | None = None
        for number, layer in enumerate(attention, start=1):
            total = [before + now for before, now in zip(total, layer, strict=True)]
            ranked = sorted(range(len(total)), key=lambda each: -total[each])
            sets.append(set(ranked[: largest_gap_cut([total[each] for each in ranked])]))
            if number >= window and all(one == sets[-1] for one in sets[-window:]):
                found = (sets[-1], number)
                break
        state = after(attention, window)
        every = set(range(len(total)))
        assert (state.focused, state.cutoff) == (found or (every, None))

    @given(layers(), st.integers(1, 4), st.data())
    def test_the_order_of_chunks_does_not_matter(
        self, attention: list[list[float]], window: int, data: st.DataObject
    ) -> None:
        every = range(len(attention[0]))
        total = [math.fsum(layer[each] for layer in attention) for each in every]
        if len(set(total)) < len(total) or any(len(set(each)) < len(each) for each in attention):
            return  # equals are told apart by number
        order = data.draw(st.permutations(list(every)))
        moved = after([[layer[each] for each in order] for layer in attention], window)
        still = after(attention, window)
        if len(set(still.attention)) == len(still.attention):
            assert {order[each] for each in moved.focused} == still.focused
