"""Tickets: what a request reserves, and what it has used at its end."""

from __future__ import annotations

import pytest

from ragcache_core.access.caller import Caller, TenantRules
from ragcache_core.access.quota import read_quota
from ragcache_core.access.usage import NOTHING_USED, Period, UsageCounts
from ragcache_gateway.admission.quotas import QuotaExceeded, Quotas
from ragcache_gateway.admission.usage_counter import Owner, UsageCounter

NOW_S = 1_700_000_010.0  # 30 seconds before the end of its minute
KEY = Owner("key", "app")


@pytest.fixture
def quotas() -> Quotas:
    return Quotas(UsageCounter(lambda: NOW_S))


def caller(**quota: int) -> Caller:
    return Caller("app", quota=read_quota("quota", quota))


def used(quotas: Quotas) -> UsageCounts:
    return quotas.counter.used(KEY, Period.MINUTE)


def test_requests_count_while_they_are_in_flight(quotas: Quotas) -> None:
    asking = caller(requests_per_minute=2)
    tickets = [quotas.admit(asking) for _ in range(2)]
    with pytest.raises(QuotaExceeded, match=r"2 of 2 requests.*'app'") as found:
        quotas.admit(asking)
    assert found.value.retry_after_s == 30
    for ticket in tickets:
        ticket.close(200)
    assert used(quotas) == UsageCounts(requests=2)
    with pytest.raises(QuotaExceeded):
        quotas.admit(asking)


def test_a_request_reserves_its_prompt_and_its_longest_answer(quotas: Quotas) -> None:
    asking = caller(tokens_per_minute=100)
    first, second, third = (quotas.admit(asking) for _ in range(3))
    first.reserve("m", UsageCounts(computed_tokens=30, cached_tokens=50), 40)  # 75
    with pytest.raises(QuotaExceeded, match="try again when the minute is over"):
        second.reserve("m", UsageCounts(computed_tokens=20), 10)
    with pytest.raises(QuotaExceeded, match="ask for less"):
        second.reserve("m", UsageCounts(computed_tokens=90), 20)
    third.reserve("m", UsageCounts(computed_tokens=20), 5)
    first.settle(UsageCounts(computed_tokens=30, cached_tokens=50, output_tokens=2))
    first.close(200)
    third.close(503)
    fourth = quotas.admit(asking)
    fourth.reserve("m", UsageCounts(computed_tokens=60), 3)
    fourth.close(503)
    second.close(429)
    assert used(quotas) == UsageCounts(3, 1, 30, 50, output_tokens=2)


def test_used_up_tokens_refuse_a_request_when_it_arrives(quotas: Quotas) -> None:
    asking = caller(tokens_per_day=10)
    ticket = quotas.admit(asking)
    ticket.reserve("m", UsageCounts(computed_tokens=5), 5)
    with pytest.raises(QuotaExceeded, match="tokens_per_day"):
        quotas.admit(asking)
    ticket.close(503)
    quotas.admit(asking).close(200)


@pytest.mark.parametrize("status", [None, 200])
def test_an_answer_that_nobody_waits_for_counts_as_far_as_it_came(
    quotas: Quotas, status: int | None
) -> None:
    ticket = quotas.admit(caller(tokens_per_day=1000))
    ticket.reserve("m", UsageCounts(computed_tokens=7, cached_tokens=3), 100)
    ticket.begin_output(lambda: 4)
    ticket.close(status)
    assert used(quotas) == UsageCounts(1, 0, 7, 3, output_tokens=4)


@pytest.mark.parametrize("status", [400, 500, 503])
def test_a_failed_request_has_no_tokens(quotas: Quotas, status: int) -> None:
    ticket = quotas.admit(caller(tokens_per_day=1000))
    ticket.reserve("m", UsageCounts(computed_tokens=7), 100)
    ticket.close(status)
    assert used(quotas) == UsageCounts(requests=1)


def test_the_keys_of_a_tenant_share_its_quota(quotas: Quotas) -> None:
    rules = TenantRules(quota=read_quota("quota", {"requests_per_month": 1}))
    app, site = Caller("app", "red", rules=rules), Caller("site", "red", rules=rules)
    quotas.admit(app).close(200)
    with pytest.raises(QuotaExceeded, match="tenant 'red'"):
        quotas.admit(site)
    quotas.admit(Caller("other", "blue")).close(200)


def test_headers_tell_the_limits_with_the_least_left(quotas: Quotas) -> None:
    asking = caller(requests_per_minute=10, requests_per_day=2, tokens_per_minute=100)
    quotas.admit(asking).close(200)
    headers = quotas.headers(asking)
    assert headers.pop("x-ratelimit-reset-requests").endswith("s")
    assert headers == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "100",
        "x-ratelimit-reset-tokens": "30s",
    }
    assert quotas.headers(Caller("free")) == {}


def test_a_caller_without_a_quota_is_counted(quotas: Quotas) -> None:
    ticket = quotas.admit(Caller("app"))
    ticket.reserve("m", NOTHING_USED, 10**9)
    ticket.settle(UsageCounts(output_tokens=1))
    ticket.close(200)
    assert used(quotas) == UsageCounts(requests=1, output_tokens=1)
