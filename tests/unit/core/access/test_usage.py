"""Windows of the calendar, and tokens as quotas count them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.access.usage import Period, UsageCounts, window_end, window_start

TIMES = st.integers(0, 1 << 36)


@given(st.sampled_from(Period), TIMES)
def test_windows_follow_each_other_without_a_gap(period: Period, unix_s: int) -> None:
    start, end = window_start(period, unix_s), window_end(period, unix_s)
    assert start <= unix_s < end
    assert window_start(period, start) == start
    assert window_start(period, end - 1) == start
    assert window_start(period, end) == end


@given(TIMES)
def test_a_window_is_inside_the_longer_ones(unix_s: int) -> None:
    for shorter, longer in ((Period.MINUTE, Period.DAY), (Period.DAY, Period.MONTH)):
        start, end = window_start(shorter, unix_s), window_end(shorter, unix_s)
        assert window_start(longer, unix_s) == window_start(longer, start)
        assert end <= window_end(longer, unix_s)


@pytest.mark.parametrize(
    ("period", "start", "end"),
    [
        (Period.MINUTE, (2028, 2, 29, 23, 59), (2028, 3, 1)),
        (Period.DAY, (2028, 2, 29), (2028, 3, 1)),
        (Period.MONTH, (2028, 2, 1), (2028, 3, 1)),
    ],
)
def test_windows_are_those_of_the_calendar_in_utc(
    period: Period, start: tuple[int, ...], end: tuple[int, ...]
) -> None:
    unix_s = datetime(2028, 2, 29, 23, 59, 30, tzinfo=UTC).timestamp()
    expected = [datetime(*one, tzinfo=UTC).timestamp() for one in (start, end)]  # type: ignore[misc,arg-type]
    assert [window_start(period, unix_s), window_end(period, unix_s)] == expected


def test_reused_tokens_count_a_share() -> None:
    counts = UsageCounts(1, 1, 100, 20, 30, 4, 5)
    assert counts.priced_tokens(0.1) == pytest.approx(100 + 4 + 5 + 0.1 * 50)
    assert counts.priced_tokens(1) == 159
    assert counts + counts == UsageCounts(2, 2, 200, 40, 60, 8, 10)
    assert not UsageCounts()
    assert UsageCounts(refusals=1)
