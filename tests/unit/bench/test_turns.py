"""Turns of contestants, and arrivals."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from bench.support.comparison import turns


@given(st.integers(1, 5), st.integers(0, 30), st.integers(0, 60), st.integers(1, 12))
def test_every_contestant_gets_every_request_once_and_in_order(
    num_contestants: int, first: int, count: int, block: int
) -> None:
    names = [str(number) for number in range(num_contestants)]
    blocks = list(turns(names, range(first, first + count), block))
    for name in names:
        asked = [turn.requests for found in blocks for turn in found if turn.contestant == name]
        assert list(chain.from_iterable(asked)) == list(range(first, first + count))


def test_in_a_block_all_get_the_same_requests() -> None:
    for block in turns("abc", range(25), 10):
        assert len({turn.requests for turn in block}) == 1
        assert sorted(turn.contestant for turn in block) == ["a", "b", "c"]


def test_each_contestant_is_as_often_at_each_position() -> None:
    blocks = list(turns("abc", range(60), 10))
    for position in range(3):
        assert set(Counter(block[position].contestant for block in blocks).values()) == {2}
