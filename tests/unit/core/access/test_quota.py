"""Quotas: what they let through, and which limit a refusal names."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.access.quota import (
    MAX_LIMIT,
    QuotaLimit,
    QuotaResource,
    Spend,
    exceeded,
    quota_fields,
    read_quota,
    scarcest,
)
from ragcache_core.access.usage import Period
from ragcache_core.errors import InvalidInput

LIMITS = st.builds(
    QuotaLimit, st.sampled_from(QuotaResource), st.sampled_from(Period), st.integers(1, 100)
)
QUOTAS = st.lists(LIMITS, max_size=6, unique_by=lambda one: one.name).map(tuple)
SPENDS = st.builds(Spend, st.integers(0, 100).map(float), st.integers(0, 100).map(float))


@given(QUOTAS, st.tuples(SPENDS, SPENDS, SPENDS), SPENDS)
def test_a_request_is_let_in_if_it_fits_every_limit(
    quota: tuple[QuotaLimit, ...], used: tuple[Spend, ...], wanted: Spend
) -> None:
    by_period = dict(zip(Period, used, strict=True))
    over = [
        one
        for one in quota
        if by_period[one.period].of(one.resource) + wanted.of(one.resource) > one.limit
    ]
    found = exceeded(quota, by_period, wanted)
    assert (found is None) == (not over)
    if found is not None:
        # When its window ends, no other limit refuses the request for longer.
        periods = list(Period)
        assert periods.index(found.period) == max(periods.index(one.period) for one in over)


@given(QUOTAS)
def test_a_quota_is_read_as_it_is_written(quota: tuple[QuotaLimit, ...]) -> None:
    assert read_quota("quota", quota_fields(quota)) == quota


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (5, "keys[0].quota"),
        ({"tokens_per_week": 1}, "keys[0].quota.tokens_per_week"),
        ({"tokens_per_day": 0}, "keys[0].quota.tokens_per_day"),
        ({"tokens_per_day": True}, "keys[0].quota.tokens_per_day"),
        ({"tokens_per_day": 1.5}, "keys[0].quota.tokens_per_day"),
        ({"requests_per_month": MAX_LIMIT + 1}, "keys[0].quota.requests_per_month"),
    ],
)
def test_a_wrong_limit_is_named(value: Any, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_quota("keys[0].quota", value)
    assert caught.value.field == field


def test_clients_are_told_the_limit_with_the_least_left() -> None:
    minute = QuotaLimit(QuotaResource.TOKENS, Period.MINUTE, 100)
    day = QuotaLimit(QuotaResource.TOKENS, Period.DAY, 1000)
    used = {Period.MINUTE: Spend(tokens=10), Period.DAY: Spend(tokens=900), Period.MONTH: Spend()}
    assert scarcest((minute, day), used, QuotaResource.TOKENS) == day
    assert scarcest((minute, day), used, QuotaResource.REQUESTS) is None
