"""Idle windows open between questions, and what questions wait for them is counted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from ragcache_gateway.background import idle
from ragcache_gateway.background.idle import IdleWindows
from ragcache_gateway.telemetry.metrics import Metrics
from tests.kit.clock import ManualClock


@dataclass
class FakePool:
    problem: str | None = None
    in_flight: int = 0


@pytest.fixture
def pool() -> Any:
    return FakePool()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def windows(pool: Any, metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> IdleWindows:
    monkeypatch.setattr(idle, "IDLE_POLL_S", 0.001)
    return IdleWindows(pool, metrics)


async def opens(windows: IdleWindows, work_s: float = 0.0) -> None:
    """Wait until a window opens."""
    async with asyncio.timeout(60), windows.window(work_s):
        pass


async def stays_closed(windows: IdleWindows, work_s: float = 0.0) -> None:
    """Check that no window opens for some time."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1), windows.window(work_s):
            pass


async def test_no_window_opens_from_a_questions_arrival_to_its_end(windows: IdleWindows) -> None:
    await opens(windows)
    with windows.question():
        # The engine does not have it yet: its chunks are being retrieved.
        await stays_closed(windows)
    await opens(windows)


async def test_no_window_opens_without_an_engine_or_beside_its_requests(
    windows: IdleWindows, pool: FakePool
) -> None:
    pool.problem = "there is none"
    await stays_closed(windows)
    pool.problem, pool.in_flight = None, 1
    await stays_closed(windows)


async def test_a_window_has_ended_once_a_question_arrives(
    windows: IdleWindows, pool: FakePool
) -> None:
    async with windows.window():
        pool.in_flight = 1  # the window's own request
        assert not windows.has_ended
        with windows.question():
            assert windows.has_ended
        assert not windows.has_ended


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    clock = ManualClock(1000.0)
    monkeypatch.setattr(idle, "time", clock)
    return clock


async def test_the_time_that_a_question_waits_for_a_window_is_counted(
    windows: IdleWindows, metrics: Metrics, clock: ManualClock
) -> None:
    async with windows.window():
        clock.now += 5.0  # no question waits for this
        with windows.question():
            clock.now += 0.5
    with windows.question():
        clock.now += 7.0
    [metric] = metrics.background_delay.collect()
    assert metric.samples[0].value == 0.5


async def test_work_does_not_begin_when_a_question_is_due(
    windows: IdleWindows, clock: ManualClock
) -> None:
    for _ in range(20):
        with windows.question():
            clock.now += 3.0
        clock.now += 10.0
    with windows.question():
        pass
    clock.now += 9.5
    await stays_closed(windows, work_s=1.0)
    await opens(windows, work_s=0.1)
    # None has come, so it may take long.
    clock.now += 2.0
    await opens(windows, work_s=1.0)
