"""Cache-aware reordering: bands first, then the window, then the cached share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.access.key_file import MAX_PRIORITY
from ragcache_core.scheduling.priority import (
    BACKGROUND_BAND,
    GUESS_BAND,
    QueuePosition,
    compose,
)

BANDS = st.one_of(
    st.integers(-MAX_PRIORITY, MAX_PRIORITY), st.sampled_from((GUESS_BAND, BACKGROUND_BAND))
)
WINDOWS_MS = st.integers(0, 600_000)
SHARES = st.floats(0, 1)
SENT_MS = st.integers(0, 4_102_444_800_000)  # until the year 2100


@given(band=BANDS, window_ms=WINDOWS_MS, share=SHARES, sent_ms=SENT_MS)
def test_a_priority_is_a_signed_number_of_64_bits(
    band: int, window_ms: int, share: float, sent_ms: int
) -> None:
    priority = QueuePosition(band, window_ms, share).priority(sent_ms)
    assert -(2**63) <= priority < 2**63


@given(
    first=BANDS, second=BANDS, window_ms=WINDOWS_MS, shares=st.tuples(SHARES, SHARES),
    sent_ms=st.tuples(SENT_MS, SENT_MS),
)  # fmt: skip
def test_a_band_goes_before_all_later_ones(
    first: int, second: int, window_ms: int, shares: tuple[float, float], sent_ms: tuple[int, int]
) -> None:
    one = QueuePosition(first, window_ms, shares[0]).priority(sent_ms[0])
    other = QueuePosition(second, window_ms, shares[1]).priority(sent_ms[1])
    if first != second:
        assert (one < other) == (first < second)


@given(
    band=BANDS, window_ms=WINDOWS_MS, shares=st.tuples(SHARES, SHARES), sent_ms=SENT_MS,
    later_ms=st.integers(1, 3_600_000),
)  # fmt: skip
def test_no_request_is_overtaken_by_one_sent_more_than_a_window_later(
    band: int, window_ms: int, shares: tuple[float, float], sent_ms: int, later_ms: int
) -> None:
    waits = QueuePosition(band, window_ms, shares[0]).priority(sent_ms)
    other = QueuePosition(band, window_ms, shares[1]).priority(sent_ms + window_ms + later_ms)
    assert waits < other


@given(
    band=BANDS, window_ms=WINDOWS_MS, cached=st.integers(0, 4000), other=st.integers(0, 4000),
    computed=st.integers(1, 4000), sent_ms=SENT_MS,
)  # fmt: skip
def test_of_two_sent_at_once_the_higher_ratio_of_cached_to_computed_is_not_later(
    band: int, window_ms: int, cached: int, other: int, computed: int, sent_ms: int
) -> None:
    def priority(num_cached: int) -> int:
        share = num_cached / (num_cached + computed)
        return QueuePosition(band, window_ms, share).priority(sent_ms)

    if cached >= other:
        assert priority(cached) <= priority(other)


def test_a_whole_window_separates_all_from_nothing() -> None:
    nothing, half, everything = (QueuePosition(3, 1000, share) for share in (0.0, 0.5, 1.0))
    assert [one.delay_ms for one in (nothing, half, everything)] == [1000, 500, 0]
    assert everything.priority(5000) == nothing.priority(4000) == compose(3, 4000, 1000)
    # Where priorities are equal, vLLM goes by arrival.


def test_without_a_window_requests_keep_their_order() -> None:
    assert QueuePosition(0, 0, 0.0).priority(7) == QueuePosition(0, 0, 1.0).priority(7) == 7


def test_guesses_follow_all_questions_and_background_work_comes_last() -> None:
    assert MAX_PRIORITY < GUESS_BAND < BACKGROUND_BAND
