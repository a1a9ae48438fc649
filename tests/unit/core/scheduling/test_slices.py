"""Slices are as short as the rate allows, and end at blocks."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.scheduling.slices import (
    ALIGNMENT_TOKENS,
    MAX_REST_SHARE,
    MAX_SLOWDOWN,
    SHORT_S,
    slice_ends,
    slice_tokens,
)


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
