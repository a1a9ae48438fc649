"""The lag is the age of the oldest change that a follower lacks or may lack."""

from __future__ import annotations

from ragcache_retriever.replication.follower import SILENCE_S, LagClock


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_follower_that_has_everything_has_no_lag() -> None:
    clock = Clock()
    lag = LagClock(clock)
    assert not lag.has_caught_up
    lag.heard(is_complete=True)
    clock.now_s += SILENCE_S
    assert lag.has_caught_up
    assert lag.lag_s(has_writer=True) == 0


def test_the_lag_begins_with_the_first_missing_change_and_ends_with_the_last() -> None:
    clock = Clock()
    lag = LagClock(clock)
    for _ in range(3):
        lag.heard(is_complete=False)
        clock.now_s += 1
    assert lag.lag_s(has_writer=True) == lag.lag_s(has_writer=False) == 3
    lag.heard(is_complete=True)
    assert lag.lag_s(has_writer=True) == 0


def test_silence_is_a_lag_only_if_somebody_may_write() -> None:
    clock = Clock()
    lag = LagClock(clock)
    lag.heard(is_complete=True)
    clock.now_s += SILENCE_S + 1
    assert lag.lag_s(has_writer=True) == SILENCE_S + 1
    assert lag.lag_s(has_writer=False) == 0
