"""The time that requests wait in an engine, from those that waited."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.cost.engine_costs import HALF_LIFE_S, QueueTime

TIMES = st.floats(0, 1e6)
WAITS = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), min_size=1)


def test_without_requests_there_is_no_queue() -> None:
    assert QueueTime().seconds(123.0) == 0


def test_a_queue_halves_while_no_request_is_measured() -> None:
    queue = QueueTime()
    queue.observe(1.0, now_s=100.0)
    first_s = queue.seconds(100.0)
    assert 0 < first_s < 1
    assert queue.seconds(100.0 + HALF_LIFE_S) == pytest.approx(first_s / 2)


def test_the_mean_reaches_the_time_that_all_requests_wait() -> None:
    queue = QueueTime()
    for _ in range(100):
        queue.observe(3.0, now_s=5.0)
    assert queue.seconds(5.0) == pytest.approx(3.0)


@given(start_s=TIMES, waits=WAITS)
def test_the_mean_is_never_longer_than_the_longest_wait(
    start_s: float, waits: list[tuple[float, float]]
) -> None:
    queue, now_s = QueueTime(), start_s
    for waited_s, later_s in waits:
        now_s += later_s
        queue.observe(waited_s, now_s)
        assert 0 <= queue.seconds(now_s) <= max(waited_s for waited_s, _ in waits)
