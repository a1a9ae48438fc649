"""Fixtures of the tests of the scheduler half."""

from __future__ import annotations

import pytest

from tests.kit.scheduler import (
    BLOCKS,
    SchedulerHarness,
)


@pytest.fixture
def engine() -> SchedulerHarness:
    return SchedulerHarness()


@pytest.fixture
def warm(engine: SchedulerHarness) -> SchedulerHarness:
    """An engine whose store has the whole prompt."""
    engine.arrive("first")
    assert engine.scheduler.loadable_tokens("first", 0) == 0
    engine.scheduler.on_allocated("first", BLOCKS, 0)
    assert len(engine.prefill("first")) == 4
    engine.scheduler.on_finished("first", BLOCKS)
    return engine
