"""When to poll for a prompt that another engine computes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.cluster.handoff_polling import INTERVAL_SHARE, MIN_INTERVAL_S, HandoffPolling

times = st.floats(0, 1e6)


@given(times, st.floats(0, 60), st.lists(st.floats(0, 5), max_size=30))
def test_it_aborts_at_the_deadline_and_not_before(
    began: float, lasts: float, steps: list[float]
) -> None:
    wait = HandoffPolling(began, began + lasts)
    now = began
    for step in steps:
        now += step
        again = wait.record_missing(now)
        assert (again is None) == (now >= wait.deadline)
        if again is not None:
            assert now < again <= wait.deadline
            assert again - now <= max(MIN_INTERVAL_S, INTERVAL_SHARE * (now - began)) * 1.01 + 1e-6


def test_the_last_lookup_is_at_the_deadline() -> None:
    wait, now, asked = HandoffPolling(0.0, 30.0), 0.0, 0
    while (again := wait.record_missing(now)) is not None:
        now, asked = again, asked + 1
    assert now == 30.0
    assert asked < 300


def test_one_unanswered_lookup_is_repeated_and_two_are_an_outage() -> None:
    wait = HandoffPolling(0.0, 60.0)
    assert wait.record_no_answer(1.0) is not None
    assert wait.record_missing(2.0) is not None
    assert wait.record_no_answer(3.0) is not None
    assert wait.record_no_answer(4.0) is None


def test_an_unanswered_lookup_does_not_extend_the_deadline() -> None:
    assert HandoffPolling(0.0, 1.0).record_no_answer(1.0) is None
