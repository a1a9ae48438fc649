"""Sends recorded metrics by OTLP over HTTP, under their OpenTelemetry names and units.

The library of Prometheus records (``metric_registry``). This module converts what it has recorded,
as OpenTelemetry's rules for Prometheus say. Only a part with a collector imports it and the SDK.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Exemplar as RecordedExemplar
from prometheus_client.samples import Sample

from ragcache_wire.telemetry.catalogue import all_rows
from ragcache_wire.telemetry.instrument import Instrument
from ragcache_wire.telemetry.semantic_conventions import SCHEMA_URL
from ragcache_wire.tracing import EXPORT_TIMEOUT_S, resource

log = logging.getLogger(__name__)

EXPORT_INTERVAL_S: Final = 15.0
"""Interval of the exports, as most backends use."""
_CUMULATIVE: Final = AggregationTemporality.CUMULATIVE
_NS: Final = 1_000_000_000
_UNKNOWN: Final[Any] = None
"""Prometheus records no extremes, and OTLP's fields for them are optional."""

Labels = tuple[tuple[str, str], ...]


class OtlpMetrics:
    """Exports the metrics of a process every EXPORT_INTERVAL_S, in a thread.

    Args:
        endpoint: Base URL, like http://collector:4318.
        part: Name of the part.
        instance: Name of this process among those of the part.
        collectors: The metrics.
    """

    def __init__(
        self, endpoint: str, part: str, instance: str, collectors: CollectorRegistry
    ) -> None:
        self._exporter = OTLPMetricExporter(
            f"{endpoint.rstrip('/')}/v1/metrics", timeout=EXPORT_TIMEOUT_S
        )
        self._collectors = collectors
        self._resource = resource(part, instance)
        self._scope = InstrumentationScope(f"ragcache.{part}", schema_url=SCHEMA_URL)
        self._started_ns = time.time_ns()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Export once more, within some seconds."""
        self._stopping.set()
        self._thread.join(2 * EXPORT_TIMEOUT_S)
        self._exporter.shutdown(timeout_millis=EXPORT_TIMEOUT_S * 1000)

    def _run(self) -> None:
        while not self._stopping.wait(EXPORT_INTERVAL_S):
            self._export()
        self._export()

    def _export(self) -> None:
        try:
            metrics = list(to_otlp(self._collectors.collect(), self._started_ns, time.time_ns()))
            scope = ScopeMetrics(self._scope, metrics, SCHEMA_URL)
            data = MetricsData([ResourceMetrics(self._resource, [scope], SCHEMA_URL)])
            self._exporter.export(data, timeout_millis=EXPORT_TIMEOUT_S * 1000)
        except Exception:  # one failed export must not end the thread
            log.exception("telemetry: metrics not exported")


def to_otlp(families: Iterable[Family], started_ns: int, now_ns: int) -> Iterator[Metric]:
    """Yield families of Prometheus as metrics of OpenTelemetry. Summaries are left out.

    Args:
        families: What a registry collects.
        started_ns: When the process began to count, in Unix time.
        now_ns: The time of the values.
    """
    rows = {row.family_name: row for row in all_rows()}
    for family in families:
        row = rows.get(family.name)
        names = {label.prometheus_name: label.name for label in row.labels} if row else {}
        data = _data(family, names, started_ns, now_ns)
        if data is not None and data.data_points:
            yield Metric(*_described(family, row), data)


def _described(family: Family, row: Instrument | None) -> tuple[str, str, str]:
    if row is None:
        return family.name, family.documentation, family.unit
    return row.name, row.description, row.unit


def _data(
    family: Family, names: Mapping[str, str], started_ns: int, now_ns: int
) -> Sum | Gauge | Histogram | None:
    match family.type:
        case "counter":
            samples = [one for one in family.samples if one.name == f"{family.name}_total"]
            points = _numbers(samples, names, started_ns, now_ns)
            return Sum(points, _CUMULATIVE, is_monotonic=True)
        case "gauge":
            return Gauge(_numbers(family.samples, names, 0, now_ns))
        case "histogram":
            return Histogram(_histograms(family, names, started_ns, now_ns), _CUMULATIVE)
    return None


def _numbers(
    samples: Iterable[Sample], names: Mapping[str, str], started_ns: int, now_ns: int
) -> list[NumberDataPoint]:
    return [
        NumberDataPoint(_attributes(one.labels, names), started_ns, now_ns, _whole(one.value))
        for one in samples
        if not math.isnan(one.value)
    ]


def _histograms(
    family: Family, names: Mapping[str, str], started_ns: int, now_ns: int
) -> list[HistogramDataPoint]:
    buckets: dict[Labels, list[Sample]] = {}
    sums: dict[Labels, float] = {}
    for sample in family.samples:
        if sample.name == f"{family.name}_bucket":
            buckets.setdefault(_series(sample), []).append(sample)
        elif sample.name == f"{family.name}_sum":
            sums[_series(sample)] = sample.value
    return [
        _histogram(series, found, sums.get(series, 0.0), names, (started_ns, now_ns))
        for series, found in buckets.items()
    ]


def _histogram(
    series: Labels,
    buckets: Sequence[Sample],
    total: float,
    names: Mapping[str, str],
    times_ns: tuple[int, int],
) -> HistogramDataPoint:
    """Convert the buckets of one series, whose counts include those of lower buckets."""
    ordered = sorted(buckets, key=lambda one: float(one.labels["le"]))
    counts = [int(one.value) for one in ordered]
    return HistogramDataPoint(
        attributes=_attributes(dict(series), names),
        start_time_unix_nano=times_ns[0],
        time_unix_nano=times_ns[1],
        count=counts[-1],
        sum=total,
        bucket_counts=[count - below for count, below in zip(counts, [0, *counts], strict=False)],
        explicit_bounds=[float(one.labels["le"]) for one in ordered[:-1]],
        min=_UNKNOWN,
        max=_UNKNOWN,
        exemplars=[_exemplar(one.exemplar) for one in ordered if one.exemplar is not None],
    )


def _exemplar(recorded: RecordedExemplar) -> Exemplar:
    return Exemplar(
        {},
        recorded.value,
        int(float(recorded.timestamp or 0.0) * _NS),
        span_id=int(recorded.labels.get("span_id", "0"), 16),
        trace_id=int(recorded.labels.get("trace_id", "0"), 16),
    )


def _series(sample: Sample) -> Labels:
    return tuple(item for item in sample.labels.items() if item[0] != "le")


def _attributes(labels: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    return {names.get(name, name): value for name, value in labels.items()}


def _whole(value: float) -> int | float:
    return int(value) if math.isfinite(value) and value == int(value) else value
