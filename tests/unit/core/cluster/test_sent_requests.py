"""Numbers of requests, and which of them an engine has accepted."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.cluster.sent_requests import WINDOW, AcceptedNumbers, SentRequest

NUMBERS = st.integers(1, 3 * WINDOW)


def accepted(numbers: list[int]) -> AcceptedNumbers:
    found = AcceptedNumbers()
    for number in numbers:
        found = found.add(number)
    return found


@given(st.lists(NUMBERS, max_size=200))
def test_recent_numbers_are_told_apart_in_any_order(numbers: list[int]) -> None:
    found, last = accepted(numbers), max(numbers, default=0)
    assert found.last == last
    for number in range(1, 4 * WINDOW):
        if number > last - WINDOW:
            assert (number in found) is (number in numbers)
        else:
            assert number in found  # it came long ago, or never


@given(st.lists(NUMBERS, max_size=100), st.randoms())
def test_the_order_and_repetitions_change_nothing(numbers: list[int], random: object) -> None:
    shuffled = [*numbers, *numbers]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = accepted(numbers), accepted(shuffled)
    assert all((n in one) is (n in other) for n in range(1, 4 * WINDOW))


def test_a_number_that_is_far_ahead_costs_nothing() -> None:
    assert accepted([1, 1 << 62]) == AcceptedNumbers(1 << 62, 1)


@given(
    st.builds(
        SentRequest,
        st.text(min_size=1, max_size=64),
        st.integers(1, 1 << 62),
        st.floats(0, 1e6),
        st.booleans(),
    )
)
def test_a_request_is_read_as_it_was_written(sent: SentRequest) -> None:
    assert SentRequest.from_field(json.loads(json.dumps(sent.to_field()))) == sent


@pytest.mark.parametrize(
    "change",
    [
        {"sender": ""},
        {"sender": 1},
        {"sender": "x" * 65},
        {"number": 0},
        {"number": True},
        {"number": 1 << 63},
        {"number": 1.0},
        {"work_s": -1},
        {"work_s": float("inf")},
        {"work_s": "1"},
    ],
)
def test_what_no_gateway_sends_is_ignored(change: dict[str, object]) -> None:
    fields = SentRequest("gateway", 1, 0.5).to_field()
    assert SentRequest.from_field(fields) is not None
    assert SentRequest.from_field(fields | change) is None
    assert SentRequest.from_field(None) is None
