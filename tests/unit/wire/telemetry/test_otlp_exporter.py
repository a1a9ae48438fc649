"""What is recorded for Prometheus, as a collector of OpenTelemetry receives it."""

from __future__ import annotations

import itertools
import math
import threading
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics.export import Histogram, Metric

from harness.otlp import collector
from harness.processes import free_port
from ragcache_wire.telemetry import otlp_exporter
from ragcache_wire.telemetry.catalogue import cachestore, gateway
from ragcache_wire.telemetry.metric_registry import Level, MetricRegistry, exemplar, export_metrics
from ragcache_wire.telemetry.otlp_exporter import to_otlp
from ragcache_wire.telemetry.semantic_conventions import SCHEMA_URL

TRACE = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}


def converted(registry: MetricRegistry) -> dict[str, Metric]:
    return {metric.name: metric for metric in to_otlp(registry.collectors.collect(), 1, 2)}


def points(metric: Metric) -> list[Any]:
    return list(metric.data.data_points)


def test_names_units_and_attributes_are_opentelemetrys() -> None:
    registry = MetricRegistry("gateway")
    registry.counter(gateway.REQUESTS).labels("/v1/models", 200).inc(3)
    registry.counter(gateway.LOADED_BYTES).inc(10)
    registry.histogram(gateway.TIME_TO_FIRST_TOKEN).labels("chat", "ragcache", "m").observe(0.3)
    found = converted(registry)
    requests = found["ragcache.gateway.requests"]
    assert (requests.unit, points(requests)[0].value) == ("{request}", 3)
    assert points(requests)[0].attributes == {"route": "/v1/models", "code": "200"}
    assert found["ragcache.gateway.loaded_bytes"].unit == "By"
    [first] = points(found["gen_ai.server.time_to_first_token"])
    assert first.attributes["gen_ai.request.model"] == "m"


def test_what_is_not_known_is_not_sent() -> None:
    registry = MetricRegistry("gateway")
    registry.gauge(gateway.BLEND_ALPHA).labels("m").set(math.nan)
    registry.gauge(gateway.BLEND_EXPECTED_QUALITY).labels("m").set(math.inf)
    found = converted(registry)
    assert gateway.BLEND_ALPHA.name not in found
    assert points(found[gateway.BLEND_EXPECTED_QUALITY.name])[0].value == math.inf


@given(st.lists(st.floats(0, 200), min_size=1, max_size=30))
def test_buckets_count_each_value_once(values: list[float]) -> None:
    registry = MetricRegistry("gateway")
    stage = registry.histogram(gateway.STAGE).labels("load")
    for value in values:
        stage.observe(value)
    data = converted(registry)[gateway.STAGE.name].data
    assert isinstance(data, Histogram)
    [point] = [one for one in data.data_points if (one.attributes or {})["stage"] == "load"]
    bounds = [-math.inf, *point.explicit_bounds, math.inf]
    wanted = [sum(low < value <= high for value in values) for low, high in pairwise(bounds)]
    assert tuple(point.explicit_bounds) == gateway.STAGE.buckets
    assert list(point.bucket_counts) == wanted
    assert (point.count, point.sum) == (len(values), sum(values))


def test_exemplars_keep_the_ids_of_trace_and_span() -> None:
    registry = MetricRegistry("gateway")
    registry.histogram(gateway.STAGE).labels("load").observe(0.3, exemplar(TRACE))
    [found] = [
        one for point in points(converted(registry)[gateway.STAGE.name]) for one in point.exemplars
    ]
    assert (found.trace_id, found.span_id) == (int("a" * 32, 16), int("b" * 16, 16))
    assert found.value == 0.3


def test_close_sends_everything_with_the_version_of_the_conventions() -> None:
    registry = MetricRegistry("cachestore")
    registry.counter(cachestore.DELETIONS).inc(2)
    with collector() as receiver:
        exported = export_metrics(f"{receiver.url}/", "cachestore", "store-0", registry.collectors)
        exported.close()
    [of_resource] = receiver.metrics()[-1].resource_metrics
    [of_scope] = of_resource.scope_metrics
    assert of_scope.schema_url == SCHEMA_URL
    [deletions] = [one for one in of_scope.metrics if one.name == cachestore.DELETIONS.name]
    assert deletions.sum.is_monotonic
    assert deletions.sum.data_points[0].as_int == 2
    # Prometheus knows no extremes.
    for metric in of_scope.metrics:
        for point in metric.histogram.data_points:
            assert not point.HasField("min")


@pytest.mark.timeout(60)
def test_metrics_that_cannot_be_read_once_are_exported_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(otlp_exporter, "EXPORT_INTERVAL_S", 0.01)
    registry = MetricRegistry("cachestore")
    reads = itertools.count()
    was_read_again = threading.Event()

    def levels() -> list[Level]:
        if next(reads) == 0:
            raise RuntimeError("the store is closing")
        was_read_again.set()
        return [(cachestore.VARIANTS, (), 7)]

    registry.observe(levels)
    with collector() as receiver:
        exported = export_metrics(receiver.url, "cachestore", "store-0", registry.collectors)
        was_read_again.wait()
        exported.close()
    assert receiver.figures()[cachestore.VARIANTS.name, frozenset()] == 7


def test_a_silent_collector_does_not_block_close() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    export_metrics(url, "cachestore", "store-0", MetricRegistry("cachestore").collectors).close()
