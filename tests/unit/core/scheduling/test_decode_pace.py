"""The time between tokens follows from the measured answers, and never from a guess."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.scheduling.decode_pace import MIN_ANSWERS, DecodePace

positive = st.floats(1e-4, 10)


def paced(
    numbers: list[int], at_zero_s: float, slope_s: float, answer_s: float = 1.0
) -> DecodePace:
    pace = DecodePace()
    for number in numbers:
        pace.observe(number, at_zero_s + slope_s * number, answer_s)
    return pace


def test_few_answers_predict_nothing() -> None:
    pace = paced([1] * (MIN_ANSWERS - 1), 0.1, 0.0)
    assert pace.token_s(2) is None
    assert pace.wait_s(2, 0.01) == 0.0


@given(at_zero_s=positive, slope_s=positive, number=st.integers(1, 100))
def test_a_line_is_found(at_zero_s: float, slope_s: float, number: int) -> None:
    pace = paced([1, 4, 8, 2] * 4, at_zero_s, slope_s)
    assert pace.token_s(number) == pytest.approx(at_zero_s + slope_s * number, rel=1e-3)


@given(token_s=positive, number=st.integers(1, 100))
def test_one_number_of_answers_says_nothing_of_a_slope(token_s: float, number: int) -> None:
    assert paced([3] * MIN_ANSWERS, token_s, 0.0).token_s(number) == pytest.approx(token_s)


@given(st.lists(st.tuples(st.integers(1, 50), positive), min_size=MIN_ANSWERS, max_size=40))
def test_more_answers_are_never_predicted_to_be_faster(seen: list[tuple[int, float]]) -> None:
    pace = DecodePace()
    for number, token_s in seen:
        pace.observe(number, token_s, 1.0)
    times = [pace.token_s(number) or 0.0 for number in range(1, 60)]
    assert times == sorted(times)
    assert min(times) >= -1e-9


def test_the_wait_is_until_enough_answers_have_ended() -> None:
    pace = paced([1, 9] * MIN_ANSWERS, 0.0, 0.01, answer_s=8.0)
    # Eight answers of eight seconds: one ends each second.
    assert pace.wait_s(8, 0.0905) == pytest.approx(0.0)
    assert pace.wait_s(8, 0.0605) == pytest.approx(3.0)
    assert pace.wait_s(8, 0.001) == 0.0, "no number of answers keeps this limit"


@given(num_decoding=st.integers(0, 50), num_pending=st.integers(0, 50), seconds=st.floats(0, 100))
def test_those_that_wait_generate_later_and_some_have_ended(
    num_decoding: int, num_pending: int, seconds: float
) -> None:
    pace = paced([1] * MIN_ANSWERS, 0.1, 0.0, answer_s=10.0)
    later = pace.num_after(num_decoding, num_pending, seconds)
    assert num_pending <= later <= num_pending + num_decoding
    if seconds >= 10.0:
        assert later == pytest.approx(num_pending), "all answers of now have ended"
    assert DecodePace().num_after(num_decoding, num_pending, seconds) == num_pending + num_decoding
