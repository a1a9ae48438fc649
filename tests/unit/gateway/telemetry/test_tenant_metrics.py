"""Metrics by tenant: what is counted, and that their number is bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.access.caller import MAX_NAMED_TENANTS, NO_TENANT, OTHER_TENANTS
from ragcache_gateway.telemetry.tenant_metrics import TenantMetrics
from ragcache_wire.telemetry.catalogue import gateway as rows
from ragcache_wire.telemetry.metric_registry import MetricRegistry

REQUESTS = rows.TENANT_REQUESTS.prometheus_name


def labels_of(registry: MetricRegistry, name: str) -> set[str]:
    return {
        sample.labels["tenant"]
        for family in registry.collectors.collect()
        for sample in family.samples
        if sample.name == name
    }


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, "answered"),
        (307, "answered"),
        (400, "refused"),
        (429, "refused"),
        (499, "disconnected"),
        (500, "failed"),
        (503, "failed"),
    ],
)
def test_requests_are_counted_by_outcome(status: int, outcome: str) -> None:
    registry = MetricRegistry("gateway")
    TenantMetrics(registry).observe_request("team-a", status)
    assert registry.sample(rows.TENANT_REQUESTS, tenant="team-a", outcome=outcome) == 1
    for other in ("answered", "refused", "failed", "disconnected"):
        if other != outcome:
            assert registry.sample(rows.TENANT_REQUESTS, tenant="team-a", outcome=other) == 0


def test_answers_are_counted_by_tenant() -> None:
    registry = MetricRegistry("gateway")
    tenants = TenantMetrics(registry)
    tenants.observe_first_token("team-a", 0.2)
    tenants.observe_tokens("team-a", {"loaded": 300, "computed": 90}, 5)
    tenants.observe_tokens("team-b", {"loaded": -1, "computed": 7}, 2)

    def value(name: str, **labels: str) -> float | None:
        return registry.collectors.get_sample_value(f"ragcache_gateway_{name}", labels)

    assert value("tenant_time_to_first_token_seconds_sum", tenant="team-a") == 0.2
    assert value("tenant_time_to_first_token_seconds_count", tenant="team-b") == 0
    assert value("tenant_prompt_tokens_total", tenant="team-a", source="loaded") == 300
    assert value("tenant_prompt_tokens_total", tenant="team-b", source="loaded") == 0
    assert value("tenant_prompt_tokens_total", tenant="team-b", source="computed") == 7
    assert value("tenant_output_tokens_total", tenant="team-a") == 5


def test_callers_without_a_tenant_have_series_from_the_start() -> None:
    registry = MetricRegistry("gateway")
    TenantMetrics(registry)
    assert registry.sample(rows.TENANT_OUTPUT_TOKENS, tenant=NO_TENANT) == 0


@given(st.lists(st.integers(0, 40), max_size=200), st.integers(2, 12))
def test_tenants_beyond_the_bound_count_among_the_others(
    numbers: list[int], max_labels: int
) -> None:
    registry = MetricRegistry("gateway")
    tenants = TenantMetrics(registry, max_labels)
    for number in numbers:
        tenants.observe_request(f"team-{number}", 200)
    named = [f"team-{number}" for number in dict.fromkeys(numbers)][: max_labels - 2]
    assert labels_of(registry, REQUESTS) == {*named, NO_TENANT, OTHER_TENANTS}
    for name in named:
        counted = registry.sample(rows.TENANT_REQUESTS, tenant=name, outcome="answered")
        assert counted == numbers.count(int(name.removeprefix("team-")))
    others = registry.sample(rows.TENANT_REQUESTS, tenant=OTHER_TENANTS, outcome="answered")
    assert others == sum(f"team-{number}" not in named for number in numbers)


def test_a_changing_key_file_never_adds_more_series_than_the_catalogue_says() -> None:
    registry = MetricRegistry("gateway")
    tenants = TenantMetrics(registry)
    # As if the tenants of the file were replaced ten times.
    for number in range(10 * MAX_NAMED_TENANTS):
        tenants.observe_request(f"team-{number}", 200)
        tenants.observe_first_token(f"team-{number}", 0.1)
        tenants.observe_tokens(f"team-{number}", {"computed": 1}, 1)
    for name in (REQUESTS, rows.TENANT_OUTPUT_TOKENS.prometheus_name):
        assert len(labels_of(registry, name)) == MAX_NAMED_TENANTS + 2
    total = sum(
        registry.sample(rows.TENANT_OUTPUT_TOKENS, tenant=name) or 0
        for name in labels_of(registry, rows.TENANT_OUTPUT_TOKENS.prometheus_name)
    )
    assert total == 10 * MAX_NAMED_TENANTS
