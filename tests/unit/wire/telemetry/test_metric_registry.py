"""Recording by the catalogue, and the formats that Prometheus reads."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Gauge

from ragcache_wire.telemetry.catalogue import cachestore, gateway
from ragcache_wire.telemetry.metric_registry import Level, MetricRegistry, exemplar, exposition

OPEN_METRICS = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
TRACE = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}


def test_an_instrument_of_another_part_is_refused() -> None:
    registry = MetricRegistry("cachestore")
    with pytest.raises(ValueError, match="no instrument of the cachestore"):
        registry.counter(gateway.REQUESTS)
    with pytest.raises(ValueError, match="is a histogram"):
        registry.counter(cachestore.READ_DURATION)


def test_series_with_known_labels_exist_from_the_start() -> None:
    registry = MetricRegistry("cachestore")
    registry.counter(cachestore.MISSES)
    assert registry.sample(cachestore.MISSES, reason="evicted") == 0
    assert registry.sample(cachestore.MISSES, reason="unheard of") is None


def test_a_level_that_is_not_of_the_part_is_refused_when_it_is_read() -> None:
    registry = MetricRegistry("cachestore")
    registry.observe(lambda: [(gateway.BLEND_ALPHA, (), 1.0)])
    with pytest.raises(ValueError, match="no instrument"):
        exposition(registry.collectors, "")


def test_levels_are_counters_and_gauges_by_their_rows() -> None:
    registry = MetricRegistry("cachestore")
    levels: list[Level] = [
        (cachestore.USED, ("memory",), 5.0),
        (cachestore.USED, ("disk",), 7.0),
        (cachestore.CONNECTIONS_ENDED, ("refused",), 2.0),
    ]
    registry.observe(lambda: levels)
    text = exposition(registry.collectors, "")[1].decode()
    assert (
        '# TYPE ragcache_store_used_bytes gauge\nragcache_store_used_bytes{tier="memory"} 5.0'
        in (text)
    )
    assert 'ragcache_store_used_bytes{tier="disk"} 7.0' in text
    assert 'ragcache_store_connections_ended_total{reason="refused"} 2.0' in text


def test_exemplars_are_in_open_metrics_alone() -> None:
    registry = MetricRegistry("gateway")
    stage = registry.histogram(gateway.STAGE).labels("load")
    stage.observe(0.02, exemplar(TRACE))
    plain_type, plain = exposition(registry.collectors, "text/plain")
    content_type, text = exposition(registry.collectors, OPEN_METRICS)
    assert plain_type.startswith("text/plain")
    assert content_type.startswith("application/openmetrics-text")
    shown = f'# {{span_id="{"b" * 16}",trace_id="{"a" * 32}"}} 0.02'
    assert shown.encode() in text
    assert shown.encode() not in plain
    assert text.endswith(b"# EOF\n")


@pytest.mark.parametrize("headers", [{}, {"traceparent": "00-a"}])
def test_without_a_trace_there_is_no_exemplar(headers: dict[str, str]) -> None:
    assert exemplar(headers) is None


def test_counters_have_no_second_series_with_their_creation() -> None:
    registry = MetricRegistry("gateway")
    registry.counter(gateway.DELETES_LOST).inc()
    assert b"_created" not in exposition(registry.collectors, OPEN_METRICS)[1]


@pytest.mark.parametrize("accept", ["", OPEN_METRICS])
def test_vllms_names_keep_their_colon(accept: str) -> None:
    collectors = CollectorRegistry()
    Gauge("vllm:num_requests_running", "Requests.", registry=collectors).set(1)
    assert b"\nvllm:num_requests_running 1.0\n" in exposition(collectors, accept)[1]
