"""Background work avoids times at which a question is due, and uses gaps that tell nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ragcache_core.background.idle_gaps import (
    ALIGNMENT_TOKENS,
    MAX_GAPS,
    MAX_REST_SHARE,
    MAX_SLOWDOWN,
    SHORT_S,
    IdleGaps,
    slice_ends,
    slice_tokens,
)
from ragcache_core.cost.prefill_profile import PrefillProfile

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


def profile(fixed_s: float, s_per_token: float, pass_tokens: int = 4096) -> PrefillProfile:
    computed = (1, 256, 1024, 4096)
    times = tuple(fixed_s + s_per_token * tokens for tokens in computed)
    return PrefillProfile((0,), computed, (times,), pass_tokens)


def test_a_slice_is_the_shortest_one_that_is_nearly_as_fast_per_token_as_any() -> None:
    # 20 ms and 0.2 ms a token: 512 tokens take 0.24 ms each, and the best 0.205.
    assert slice_tokens(profile(0.02, 0.0002), 0.0) == 512
    assert slice_tokens(profile(0.002, 0.0002), 0.0) == ALIGNMENT_TOKENS


def test_the_time_of_a_request_makes_slices_longer() -> None:
    assert slice_tokens(profile(0.02, 0.0002), 0.02) > slice_tokens(profile(0.02, 0.0002), 0.0)


def test_a_fast_engine_computes_as_much_as_20_ms_allow() -> None:
    assert slice_tokens(profile(0.0001, 0.00001), 0.0) == 1920


@given(
    fixed_s=st.floats(1e-4, 0.1),
    s_per_token=st.floats(1e-6, 1e-2),
    request_s=st.floats(0, 0.1),
    pass_tokens=st.integers(1, 8192),
)
def test_a_slice_is_short_or_needed_for_the_rate(
    fixed_s: float, s_per_token: float, request_s: float, pass_tokens: int
) -> None:
    measured = profile(fixed_s, s_per_token, pass_tokens)
    tokens = slice_tokens(measured, request_s)
    longest = max(ALIGNMENT_TOKENS, pass_tokens // ALIGNMENT_TOKENS * ALIGNMENT_TOKENS)
    assert tokens % ALIGNMENT_TOKENS == 0
    assert ALIGNMENT_TOKENS <= tokens <= longest
    sizes = range(ALIGNMENT_TOKENS, longest + 1, ALIGNMENT_TOKENS)
    best_s = min((request_s + measured.predict(0, size)) / size for size in sizes)
    shorter = tokens - ALIGNMENT_TOKENS
    if request_s + measured.predict(0, tokens) > SHORT_S and shorter:
        assert (request_s + measured.predict(0, shorter)) / shorter > MAX_SLOWDOWN * best_s


@given(first=st.integers(0, 5000), length=st.integers(1, 5000), tokens=st.integers(1, 3000))
def test_slices_cover_the_prompt_and_none_is_long_or_a_short_rest(
    first: int, length: int, tokens: int
) -> None:
    ends = slice_ends(first, first + length, tokens)
    assert ends[-1] == first + length
    sizes = [b - a for a, b in pairwise([first, *ends])]
    assert all(0 < size <= tokens for size in sizes[:-1])
    assert sizes[-1] <= (1 + MAX_REST_SHARE) * tokens
    if len(sizes) > 1:
        assert sizes[-1] > MAX_REST_SHARE * tokens
    if tokens >= ALIGNMENT_TOKENS:
        assert all(end % ALIGNMENT_TOKENS == 0 for end in ends[:-1])
