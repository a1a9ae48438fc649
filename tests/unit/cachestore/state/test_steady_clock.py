"""Unix times on the monotonic clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_cachestore.state.tombstones import SteadyClock

steps = st.integers(-(10**9), 10**9)


@given(st.integers(0, 10**9), steps, steps)
def test_only_the_present_wall_clock_counts(age_ms: int, before_ms: int, step_ms: int) -> None:
    wall_ms = 10**12 + before_ms
    clock = SteadyClock(lambda: 50.0, lambda: wall_ms)
    assert clock.now_ms() == 50_000
    wall_ms += step_ms
    then_ms = clock.of_unix(wall_ms - age_ms)
    assert then_ms == 50_000 - age_ms
    assert clock.to_unix(then_ms) == wall_ms - age_ms


def test_what_is_still_to_come_counts_as_now() -> None:
    clock = SteadyClock(lambda: 50.0, lambda: 1000)
    assert clock.of_unix(5000) == 50_000


def test_a_time_before_1970_is_1970() -> None:
    clock = SteadyClock(lambda: 50.0, lambda: 1000)
    assert clock.to_unix(0) == 0
