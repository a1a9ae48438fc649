"""Increases, rates and percentiles of metrics that are read twice."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from ragcache_cli.monitoring.metric_series import MetricSeries, increases, percentile, rate
from ragcache_wire.telemetry.catalogue import gateway
from ragcache_wire.telemetry.metric_registry import MetricRegistry

A, B = frozenset({("code", "200")}), frozenset({("code", "503")})
BOUNDS = (0.1, 0.5, 1.0, 5.0)


def page(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()


def test_a_counter_that_shrank_has_started_again() -> None:
    assert increases({A: 5.0, B: 9.0}, {A: 7.0, B: 2.0}) == {A: 2.0, B: 2.0}
    assert increases({}, {A: 3.0}) == {A: 3.0}


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_an_increase_is_never_negative(before: float, after: float) -> None:
    assert increases({A: before}, {A: after})[A] >= 0


def test_rates_are_of_the_catalogues_names() -> None:
    registry = MetricRegistry("gateway")
    requests = registry.counter(gateway.REQUESTS)
    requests.labels("/v1/search", "200").inc(4)
    before = MetricSeries.parse([page(registry.collectors)])
    requests.labels("/v1/search", "200").inc(6)
    requests.labels("/v1/search", "503").inc(2)
    after = MetricSeries.parse([page(registry.collectors)])
    assert rate(before, after, 2.0, gateway.REQUESTS) == 4.0
    assert rate(before, after, 2.0, gateway.REQUESTS, code="503") == 1.0
    assert rate(before, after, 2.0, gateway.DELETES_LOST) is None
    assert after.total(gateway.REQUESTS) == 12.0
    assert after.total(gateway.DELETES_WAITING) is None


@given(st.lists(st.floats(0, 10), min_size=1), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_percentile_is_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    registry = CollectorRegistry()
    recorded = Histogram(
        gateway.TIME_TO_FIRST_TOKEN.family_name, "x", buckets=BOUNDS, registry=registry
    )
    for value in values:
        recorded.observe(value)
    series = MetricSeries.parse([page(registry)])
    found = percentile(series.buckets(gateway.TIME_TO_FIRST_TOKEN), share)
    true = sorted(values)[math.ceil(share * len(values)) - 1]
    upper = next((bound for bound in BOUNDS if true <= bound), math.inf)
    lower = max((bound for bound in (0.0, *BOUNDS) if bound < upper), default=0.0)
    assert found is not None
    # Interpolation rounds at the bounds of the bucket.
    assert lower - 1e-9 <= found <= upper + 1e-9


def test_a_percentile_needs_an_observation() -> None:
    assert percentile({}, 0.5) is None
    assert percentile({frozenset({("le", "1.0")}): 0.0}, 0.5) is None


def test_a_percentile_interpolates() -> None:
    buckets = {frozenset({("le", le)}): n for le, n in (("1.0", 0.0), ("2.0", 4.0), ("+Inf", 5.0))}
    assert percentile(buckets, 0.4) == pytest.approx(1.5)
    assert percentile(buckets, 0.99) == 2.0


def test_a_page_that_is_not_metrics_is_refused() -> None:
    with pytest.raises(ValueError, match=r".+"):
        MetricSeries.parse(["<html>welcome</html>"])
