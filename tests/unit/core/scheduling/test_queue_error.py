"""How much longer than predicted requests wait."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.scheduling.queue_error import COVERED_SHARE, MAX_FACTOR, QueueError

seconds = st.floats(0, 1000)


@given(st.lists(st.tuples(seconds, seconds, seconds)))
def test_the_factor_stays_in_its_bounds(waits: list[tuple[float, float, float]]) -> None:
    error = QueueError()
    for predicted_s, took_s, work_s in waits:
        error.observe(predicted_s, took_s, work_s)
        assert 1.0 <= error.factor <= MAX_FACTOR + 1e-9


def test_most_waits_are_covered() -> None:
    rng, error, covered = random.Random(3), QueueError(), 0
    for i in range(2000):
        wait_s = rng.lognormvariate(0.2, 0.4)
        covered += i >= 1000 and wait_s <= error.factor
        error.observe(1.0, wait_s + 0.5, 0.5)
    assert covered / 1000 == pytest.approx(COVERED_SHARE, abs=0.05)


def test_predictions_that_hold_need_no_factor() -> None:
    error = QueueError()
    for _ in range(20):
        error.observe(1.0, 9.0, 0.5)
    assert error.factor == pytest.approx(MAX_FACTOR)
    for _ in range(300):
        error.observe(1.0, 1.0, 0.5)
    assert error.factor == 1.0


def test_short_waits_say_nothing() -> None:
    error = QueueError()
    for _ in range(20):
        error.observe(0.1, 9.0, 1.0)
    assert error.factor == 1.0
