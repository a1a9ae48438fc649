"""Background work avoids times at which a question is due, and uses gaps that tell nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ragcache_core.scheduling.idle_gaps import MAX_GAPS, IdleGaps

POLL_S = 0.01


def simulate(draw: Callable[[], float], work_s: float, *, always: bool) -> tuple[float, float]:
    """Return the share of the gaps that work used, and the mean delay of questions in seconds."""
    gaps = IdleGaps()
    total_s = used_s = delay_s = 0.0
    count = 1000
    for _ in range(count):
        gap_s = draw()
        elapsed_s = 0.0
        while elapsed_s < gap_s:
            if always or gaps.may_begin(elapsed_s, work_s):
                used_s += min(work_s, gap_s - elapsed_s)
                elapsed_s += work_s
                delay_s += max(0.0, elapsed_s - gap_s)
            else:
                elapsed_s += POLL_S
        total_s += gap_s
        gaps.record(gap_s)
    return used_s / total_s, delay_s / count


@pytest.mark.parametrize("work_s", [0.07, 0.25])
@pytest.mark.parametrize("spread", [0.02, 0.05])
def test_regular_questions_are_delayed_little_and_their_gaps_are_used(
    work_s: float, spread: float
) -> None:
    def run(*, always: bool) -> tuple[float, float]:
        rng = random.Random(1)
        return simulate(lambda: max(0.01, rng.gauss(1.0, spread)), work_s, always=always)

    (used, delay_s), (_, delay_always_s) = run(always=False), run(always=True)
    assert used > 0.75
    assert delay_s < 0.25 * delay_always_s


@pytest.mark.parametrize("mean_s", [0.3, 1.0, 30.0])
def test_memoryless_gaps_are_used(mean_s: float) -> None:
    rng = random.Random(2)
    used, _ = simulate(lambda: rng.expovariate(1 / mean_s), 0.07, always=False)
    assert used > 0.9


def test_between_the_questions_of_a_burst_no_work_begins() -> None:
    def run(*, always: bool) -> tuple[float, float]:
        rng = random.Random(3)
        return simulate(lambda: rng.choice([0.05] * 9 + [30.0]), 0.25, always=always)

    (used, delay_s), (_, delay_always_s) = run(always=False), run(always=True)
    assert used > 0.9
    assert delay_s < 0.02 * delay_always_s


def test_without_earlier_gaps_work_begins() -> None:
    assert IdleGaps().may_begin(0.0, 10.0)


@given(gaps=st.lists(st.floats(0, 100), max_size=2 * MAX_GAPS), work_s=st.floats(1e-3, 10))
def test_work_begins_in_a_gap_longer_than_all_before(gaps: list[float], work_s: float) -> None:
    seen = IdleGaps()
    for gap_s in gaps:
        seen.record(gap_s)
    assert seen.may_begin(101.0, work_s)


@example(gaps=[5e-324], elapsed_s=0.0, work_s=1.5)
@given(
    gaps=st.lists(st.floats(0, 100), max_size=MAX_GAPS),
    elapsed_s=st.floats(0, 100),
    work_s=st.floats(1e-3, 10),
)
def test_the_expected_delay_is_at_most_the_time_of_the_work(
    gaps: list[float], elapsed_s: float, work_s: float
) -> None:
    seen = IdleGaps()
    for gap_s in gaps:
        seen.record(gap_s)
    assert 0 <= seen.mean_delay_s(work_s) <= work_s * (1 + 1e-9)
    assert 0 <= seen.expected_delay_s(elapsed_s, work_s) <= work_s * (1 + 1e-9)


@pytest.mark.parametrize("gap_s", [-1.0, float("nan"), float("inf")])
def test_a_gap_is_a_finite_time(gap_s: float) -> None:
    with pytest.raises(ValueError, match="gap_s"):
        IdleGaps().record(gap_s)
