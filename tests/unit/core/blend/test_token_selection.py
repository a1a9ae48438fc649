"""Which tokens are recomputed: the first of an order, within one budget, outside the exact head."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.blend.token_selection import (
    TokenSelection,
    select_tokens,
    share_to_tokens,
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
