"""A request is refused if it is predicted to exceed a limit, and told when to come again."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.scheduling.admission import (
    EARLY_RATIO,
    LatencyForecast,
    LatencyLimits,
    RefusalCode,
    judge,
    judge_early,
)

seconds = st.floats(0, 1e3)
limit = st.none() | st.floats(0.001, 1e3)
forecasts = st.builds(
    LatencyForecast, seconds, seconds, st.none() | seconds, st.none() | seconds, seconds
)
limits = st.builds(LatencyLimits, limit, limit, limit)


@given(forecast=forecasts, allowed=limits)
def test_a_request_is_refused_exactly_if_a_limit_is_exceeded(
    forecast: LatencyForecast, allowed: LatencyLimits
) -> None:
    first_s, next_s = forecast.first_token_s, forecast.next_token_s
    first_limits = [one for one in (allowed.first_token_s, allowed.deadline_s) if one is not None]
    is_over = first_s is not None and bool(first_limits) and first_s > min(first_limits)
    is_slow = next_s is not None and allowed.next_token_s is not None
    is_slow = is_slow and (next_s or 0.0) > (allowed.next_token_s or 0.0)
    refusal = judge(forecast, allowed)
    assert (refusal is not None) == (is_over or is_slow)
    if refusal is None:
        return
    assert refusal.predicted_s > refusal.limit_s
    assert refusal.retry_after_s >= 0
    if is_over:
        assert refusal.limit_s == min(first_limits), "the lower limit is named"
    else:
        assert refusal.reason is RefusalCode.NEXT_TOKEN


@given(forecast=forecasts, allowed=limits)
def test_nothing_is_refused_without_a_forecast_or_a_limit(
    forecast: LatencyForecast, allowed: LatencyLimits
) -> None:
    assert judge(forecast, LatencyLimits()) is None
    assert judge(replace(forecast, work_s=None, next_token_s=None), allowed) is None


@given(forecast=forecasts, allowed=limits)
def test_after_the_wait_the_request_is_admitted_if_a_queue_was_the_cause(
    forecast: LatencyForecast, allowed: LatencyLimits
) -> None:
    forecast = replace(forecast, next_token_s=None)
    refusal = judge(forecast, allowed)
    if refusal is None:
        return
    assert refusal.retry_after_s <= forecast.queue_s
    # Rounding of the difference may leave it over the limit by a little.
    left_s = max(0.0, forecast.queue_s - refusal.retry_after_s - 1e-6)
    later = judge(replace(forecast, queue_s=left_s), allowed)
    assert (later is None) == refusal.fits_idle or left_s == 0.0


@given(elapsed_s=seconds, queue_s=seconds, work_s=seconds, allowed=limits)
def test_an_early_refusal_is_one_of_the_last_plan_too(
    elapsed_s: float, queue_s: float, work_s: float, allowed: LatencyLimits
) -> None:
    early = judge_early(elapsed_s, queue_s, allowed)
    if early is not None:
        assert early.predicted_s > EARLY_RATIO * early.limit_s
        assert judge(LatencyForecast(elapsed_s, queue_s, work_s), allowed) is not None
