"""Callers take turns, however much of each waits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.scheduling.turns import Turns


def taken(turns: Turns[str, int]) -> list[tuple[str, int]]:
    """Take and finish all items, one after the other."""
    found = []
    while (turn := turns.take()) is not None:
        found.append(turn)
        turns.finish(turn[0])
    return found


def test_a_caller_with_one_item_waits_for_one_of_each_other_caller() -> None:
    turns: Turns[str, int] = Turns(1)
    for i in range(100):
        turns.add("red", i)
    for i in range(50):
        turns.add("green", i)
    turns.add("blue", 0)
    order = taken(turns)
    assert order[:5] == [("red", 0), ("green", 0), ("blue", 0), ("red", 1), ("green", 1)]
    assert len(order) == 151


def test_a_caller_has_no_more_in_work_than_it_may() -> None:
    turns: Turns[str, int] = Turns(2)
    for i in range(4):
        turns.add("red", i)
    assert [turns.take(), turns.take(), turns.take()] == [("red", 0), ("red", 1), None]
    turns.add("blue", 0)
    assert turns.take() == ("blue", 0)
    turns.finish("red")
    assert turns.take() == ("red", 2)


def test_items_that_nothing_wants_are_dropped_and_cost_no_turn() -> None:
    turns: Turns[str, int] = Turns(1)
    for i in range(10):
        turns.add("red", i)
    turns.add("blue", 9)
    assert turns.take(lambda item: item >= 9) == ("red", 9)
    assert turns.take(lambda item: item >= 9) == ("blue", 9)
    turns.finish("red")
    assert turns.take() is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 99)), max_size=30))
def test_everything_is_taken_once_and_each_caller_s_items_in_their_order(
    items: list[tuple[str, int]],
) -> None:
    turns: Turns[str, int] = Turns(1)
    for caller, item in items:
        turns.add(caller, item)
    order = taken(turns)
    for caller in "abc":
        assert [i for c, i in order if c == caller] == [i for c, i in items if c == caller]
