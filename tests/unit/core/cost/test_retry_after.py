"""``Retry-After`` follows what is known: service times, the clients refused before, outages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.cost.retry_after import (
    MAX_WAIT_S,
    MIN_JITTER_S,
    MIN_WAIT_S,
    OutageForecast,
    SlotForecast,
    jitter,
)

seconds = st.floats(0, 1e4)
units = st.floats(0, 1)


@given(wait_s=st.floats(0, 1e9), unit=units)
def test_jitter_only_adds_and_stays_within_a_minute(wait_s: float, unit: float) -> None:
    jittered_s = jitter(wait_s, unit)
    assert max(MIN_WAIT_S, min(wait_s, MAX_WAIT_S)) <= jittered_s <= 60


@given(wait_s=seconds)
def test_jitter_spreads_clients_over_seconds(wait_s: float) -> None:
    # The difference of two floats is rounded.
    assert jitter(wait_s, 1) - jitter(wait_s, 0) >= MIN_JITTER_S - 1e-6


def test_each_refused_request_is_promised_the_next_slot() -> None:
    forecast = SlotForecast()
    forecast.record(0.0, 10.0)
    promises = [forecast.promise_slot_s(0.0, 5, 0.0) for _ in range(4)]
    assert promises == pytest.approx([2, 4, 6, 8])
    assert forecast.promise_slot_s(8.0, 5, 0.0) == pytest.approx(2), "kept promises are over"


def test_slots_that_are_freed_sooner_than_promised_end_the_queue() -> None:
    forecast = SlotForecast()
    forecast.record(0.0, 10.0)
    for _ in range(20):
        forecast.promise_slot_s(0.0, 5, 0.0)
    for _ in range(15):
        forecast.record(1.0, 10.0)
    assert forecast.promise_slot_s(1.0, 5, 0.0) == pytest.approx(12), "five promises are left"
    for _ in range(10):
        forecast.record(2.0, 10.0)
    assert forecast.promise_slot_s(2.0, 5, 0.0) == pytest.approx(2), "none is left"


@given(num_promises=st.integers(1, 30), service_s=st.floats(0.1, 6.0), num_slots=st.integers(1, 9))
def test_slots_that_are_freed_as_promised_leave_the_queue_as_it_is(
    num_promises: int, service_s: float, num_slots: int
) -> None:
    freed, unknown = SlotForecast(), SlotForecast()
    for forecast in (freed, unknown):
        forecast.record(0.0, service_s)
        for _ in range(num_promises):
            wait_s = forecast.promise_slot_s(0.0, num_slots, 0.0)
    interval_s = service_s / num_slots
    num_freed = int(wait_s / interval_s / 2)
    for i in range(num_freed):
        freed.record((i + 1) * interval_s, service_s)
    now = num_freed * interval_s
    expected_s = unknown.promise_slot_s(now, num_slots, 0.0)
    assert freed.promise_slot_s(now, num_slots, 0.0) == pytest.approx(expected_s)


def test_stuck_requests_are_expected_to_take_longer_than_usual() -> None:
    forecast = SlotForecast()
    forecast.record(0.0, 1.0)
    assert forecast.promise_slot_s(0.0, 1, 0.5) == pytest.approx(1)
    assert forecast.promise_slot_s(100.0, 1, 30.0) == pytest.approx(30)


@given(
    services=st.lists(seconds),
    calls=st.lists(st.tuples(seconds, st.integers(0, 9), seconds), min_size=1),
)
def test_promises_are_bounded_and_never_go_back(
    services: list[float], calls: list[tuple[float, int, float]]
) -> None:
    forecast = SlotForecast()
    for service_s in services:
        forecast.record(0.0, service_s)
    now = promised_at = 0.0
    for passed_s, num_slots, age_s in calls:
        now += passed_s
        wait_s = forecast.promise_slot_s(now, num_slots, age_s)
        assert 0 <= wait_s <= MAX_WAIT_S + 1e-6
        assert now + wait_s >= min(promised_at, now + MAX_WAIT_S) - 1e-6
        promised_at = now + wait_s


def test_an_outage_is_expected_to_last_as_long_as_earlier_ones() -> None:
    forecast = OutageForecast()
    for start in (0.0, 100.0, 200.0):
        forecast.record(start, is_up=True)
        forecast.record(start + 10, is_up=False)
        forecast.record(start + 40, is_up=True)
    forecast.record(300.0, is_up=False)
    assert forecast.remaining_s(300.0) == pytest.approx((3 * 30 + 1) / 4)
    assert forecast.remaining_s(320.0) == pytest.approx((3 * 10 + 20) / 4)
    assert forecast.remaining_s(331.0) == pytest.approx(31), "longer than any before"


def test_the_time_before_a_component_was_first_up_is_no_outage() -> None:
    forecast = OutageForecast()
    forecast.record(0.0, is_up=False)
    assert forecast.remaining_s(20.0) == pytest.approx(20)
    forecast.record(30.0, is_up=True)
    assert forecast.remaining_s(31.0) == MIN_WAIT_S


@given(states=st.lists(st.tuples(seconds, st.booleans())), later_s=seconds)
def test_a_recovery_is_neither_now_nor_far_away(
    states: list[tuple[float, bool]], later_s: float
) -> None:
    forecast = OutageForecast()
    now = 0.0
    for passed_s, is_up in states:
        now += passed_s
        forecast.record(now, is_up=is_up)
    assert 0 < forecast.remaining_s(now + later_s) <= MAX_WAIT_S
