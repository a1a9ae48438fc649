"""Records the instruments of one process, and writes them in Prometheus' formats.

The client library of Prometheus records, because vLLM uses it and because an addition takes a
fraction of OpenTelemetry's time (ADR 93). ``otlp_exporter`` sends what is
recorded, where a collector is set.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from ragcache_wire.telemetry.catalogue import rows_of
from ragcache_wire.telemetry.instrument import Instrument, InstrumentKind

_OPEN_METRICS: Final = "application/openmetrics-text"
_SHARED_READ_S: Final = 1.0
"""Prometheus and a collector that read in this time get the same levels."""

Recorded = TypeVar("Recorded", Counter, Gauge, Histogram)

Level = tuple[Instrument, tuple[str, ...], float]
"""The value of an instrument now, with the values of its labels."""


class MetricRegistry:
    """The instruments of one part, which are those of its catalogue.

    Args:
        part: Name of the part in the catalogue.
    """

    def __init__(self, part: str) -> None:
        # Without it, each counter has a second series with its time of creation.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._part = part
        self._rows = frozenset(row.name for row in rows_of(part).values())
        self.collectors = CollectorRegistry()
        ProcessCollector(registry=self.collectors)

    def counter(self, row: Instrument) -> Counter:
        """Return the counter of a row. Raises ValueError if the part has no such row."""
        self._check(row, InstrumentKind.COUNTER)
        made = Counter(row.family_name, row.description, row.label_names, registry=self.collectors)
        return _with_known_series(made, row)

    def gauge(self, row: Instrument) -> Gauge:
        """Return the gauge of a row. Raises ValueError if the part has no such row."""
        self._check(row, InstrumentKind.GAUGE)
        made = Gauge(row.family_name, row.description, row.label_names, registry=self.collectors)
        return _with_known_series(made, row)

    def histogram(self, row: Instrument) -> Histogram:
        """Return the histogram of a row. Raises ValueError if the part has no such row."""
        self._check(row, InstrumentKind.HISTOGRAM)
        made = Histogram(
            row.family_name,
            row.description,
            row.label_names,
            buckets=row.buckets,
            registry=self.collectors,
        )
        return _with_known_series(made, row)

    def observe(self, read: Callable[[], Iterable[Level]]) -> None:
        """Call read for levels whenever the metrics are read, in any thread.

        Args:
            read: Returns values of the part's counters and gauges, those of one instrument one
                after the other.
        """
        self.collectors.register(_LevelsCollector(read, self._check))

    def sample(self, row: Instrument, **labels: str) -> float | None:
        """Return the value of a counter or gauge now, or None if it has no such series."""
        return self.collectors.get_sample_value(row.prometheus_name, labels)

    def _check(self, row: Instrument, *kinds: InstrumentKind) -> None:
        if row.name not in self._rows:
            raise ValueError(f"{row.name} is no instrument of the {self._part}")
        if row.kind not in kinds:
            raise ValueError(f"{row.name} is a {row.kind}")


def _with_known_series(metric: Recorded, row: Instrument) -> Recorded:
    for values in row.known_series():
        metric.labels(*values)
    return metric


def exposition(collectors: CollectorRegistry, accept: str) -> tuple[str, bytes]:
    """Return content type and text of the metrics.

    Args:
        accept: The Accept header. Exemplars need OpenMetrics, which Prometheus asks for.
    """
    if _OPEN_METRICS not in accept:
        return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(collectors)
    # The library's own choice would write vLLM's names, as vllm:x, with an underscore.
    text: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]
        collectors, escaping=openmetrics.ALLOWUTF8
    )
    return f"{_OPEN_METRICS}; version=1.0.0; charset=utf-8", text


class _LevelsCollector(Collector):
    def __init__(
        self,
        read: Callable[[], Iterable[Level]],
        check: Callable[[Instrument, InstrumentKind, InstrumentKind], None],
    ) -> None:
        self._read = read
        self._check = check
        self._lock = threading.Lock()
        self._levels: tuple[Level, ...] = ()
        self._read_at_s = -_SHARED_READ_S

    def describe(self) -> list[Metric]:
        """Return nothing, so that the registry does not read the levels at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the families of the levels."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for row, values, value in self._levels_now():
            if (family := families.get(row.name)) is None:
                family = families[row.name] = self._family(row)
            family.add_metric(values, value)
        yield from families.values()

    def _levels_now(self) -> tuple[Level, ...]:
        with self._lock:
            now = time.monotonic()
            if now - self._read_at_s >= _SHARED_READ_S:
                self._levels, self._read_at_s = tuple(self._read()), now
            return self._levels

    def _family(self, row: Instrument) -> CounterMetricFamily | GaugeMetricFamily:
        self._check(row, InstrumentKind.COUNTER, InstrumentKind.GAUGE)
        is_counter = row.kind is InstrumentKind.COUNTER
        family = CounterMetricFamily if is_counter else GaugeMetricFamily
        return family(row.family_name, row.description, labels=row.label_names)


def exemplar(headers: Mapping[str, str]) -> dict[str, str] | None:
    """Return an exemplar that leads to the trace of a span, or None without one.

    Args:
        headers: ``Span.headers()`` of a span, which are empty if it is not recorded.
    """
    parts = headers.get("traceparent", "").split("-")
    return {"trace_id": parts[1], "span_id": parts[2]} if len(parts) == 4 else None


class MetricsExport(Protocol):
    """An export that runs until it is closed."""

    def close(self) -> None:
        """Export once more, within some seconds."""


class NoMetricsExport:
    """The export of a part without a collector, which sends nothing."""

    def close(self) -> None:
        """Do nothing."""


def export_metrics(
    endpoint: str | None, part: str, instance: str, collectors: CollectorRegistry
) -> MetricsExport:
    """Export the metrics of a process from now on.

    Args:
        endpoint: Base URL, like http://collector:4318. None: nothing is exported.
        part: Name of the part.
        instance: Name of this process among those of the part.
        collectors: The metrics.
    """
    if endpoint is None:
        return NoMetricsExport()
    # It imports the SDK of OpenTelemetry, which parts without a collector do without.
    from ragcache_wire.telemetry.otlp_exporter import OtlpMetrics  # noqa: PLC0415

    return OtlpMetrics(endpoint, part, instance, collectors)
