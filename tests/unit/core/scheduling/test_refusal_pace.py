"""The pace of refusals: bursts are answered at once, floods at a rate."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.scheduling.refusal_pace import (
    BURST,
    MAX_DELAY_S,
    REFUSALS_PER_S,
    RefusalPace,
)


def test_a_burst_is_answered_at_once_and_the_next_refusal_waits() -> None:
    pace = RefusalPace()
    assert [pace.delay_s(100.0) for _ in range(BURST)] == [0.0] * BURST
    assert pace.delay_s(100.0) > 0
    assert pace.delay_s(200.0) == 0


@given(st.lists(st.floats(0, 2), max_size=200))
def test_delays_are_bounded(gaps_s: list[float]) -> None:
    pace, now_s = RefusalPace(), 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        assert 0 <= pace.delay_s(now_s) <= MAX_DELAY_S


def test_connections_that_always_ask_again_get_the_rate() -> None:
    """A hundred connections wait for the answer of each refusal and ask again at once."""
    pace, due_s, num_answers, seconds = RefusalPace(), [0.0] * 100, 0, 20.0
    while (now_s := min(due_s)) < seconds:
        due_s[due_s.index(now_s)] = now_s + pace.delay_s(now_s)
        num_answers += 1
    assert num_answers <= BURST + len(due_s) + REFUSALS_PER_S * seconds
