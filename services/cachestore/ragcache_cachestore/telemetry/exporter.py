"""The telemetry of a store: metrics of its catalogue, and spans over OTLP/HTTP.

``Telemetry`` does nothing, for a store without a process, and ``RecordingTelemetry`` counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Self, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram

from ragcache_core.identity.variant import Miss, Tier
from ragcache_core.store_api import Ack, PutOutcome
from ragcache_wire.telemetry.catalogue import cachestore as rows
from ragcache_wire.telemetry.metric_registry import (
    Level,
    MetricRegistry,
    MetricsExport,
    NoMetricsExport,
    export_metrics,
)
from ragcache_wire.tracing import NO_SPAN, Attribute, Headers, Span, SpanKind, Tracer, tracer

PART: Final = "cachestore"

Metric = TypeVar("Metric", Counter, Histogram)


@dataclass(frozen=True, slots=True)
class StoreLevels:
    """The sizes of a store at one time.

    Attributes:
        bytes_by_precision: Bytes of values by "key/value" of their codecs.
        score_histogram: Number of variants by power of ten of their score, lowest first.
    """

    variants: int
    memory_bytes: int
    memory_capacity_bytes: int
    disk_bytes: int
    disk_capacity_bytes: int
    leases: int
    tombstones: int
    unwritten: int
    connections: int
    connections_evicted: int
    connections_refused: int
    bytes_by_precision: Mapping[str, int]
    score_histogram: Sequence[int]


class Telemetry:
    """Telemetry that is not exported. Every method is safe to call from any thread."""

    def hit(self, tier: Tier, transport: str, num_bytes: int, seconds: float) -> None:
        """Count a value that was served.

        Args:
            seconds: From the call until the last byte was handed over.
        """

    def miss(self, reason: Miss) -> None:
        """Count a variant that was asked for and not served."""

    def orphans_dropped(self, count: int) -> None:
        """Count variants that were dropped because their parent is gone."""

    def reported_uses(self, counted: int, unknown: int) -> None:
        """Count uses that engines reported, of variants that are stored and of others."""

    def put(
        self, outcome: PutOutcome, ack: Ack, transport: str, num_bytes: int, seconds: float
    ) -> None:
        """Count a put that has ended.

        Args:
            seconds: From the call until it was acknowledged.
        """

    def evicted(self, tier: Tier, policy: str, num_bytes: int) -> None:
        """Count a value that was evicted from a tier."""

    def deleted(self, num_variants: int) -> None:
        """Count the variants that a delete dropped."""

    def observe(self, read: Callable[[], StoreLevels]) -> None:
        """Call read for the store's levels whenever the metrics are read, in any thread."""

    def span(self, name: str, metadata: Headers = (), **attributes: Attribute) -> Span:
        """Return a span for a block, as a child of the caller's (W3C ``traceparent`` in metadata).

        A call without a trace context makes no span, so clients decide what is traced. An
        exception that leaves the block is recorded.
        """
        return NO_SPAN

    def close(self) -> None:
        """Export what is left, within some seconds."""


class RecordingTelemetry(Telemetry):
    """Telemetry that counts, and makes spans of a tracer. It closes both tracer and export.

    Args:
        tracer: Makes the spans.
        export: Sends the metrics elsewhere. Prometheus reads ``collectors``.
    """

    def __init__(
        self, registry: MetricRegistry, tracer: Tracer, export: MetricsExport | None = None
    ) -> None:
        self._registry = registry
        self._tracer = tracer
        self._export = export or NoMetricsExport()
        self._hits = _Children(registry.counter(rows.HITS))
        self._read_bytes = _Children(registry.counter(rows.READ_SIZE))
        self._read_seconds = _Children(registry.histogram(rows.READ_DURATION))
        self._misses = _Children(registry.counter(rows.MISSES))
        self._reported_uses = _Children(registry.counter(rows.USES_REPORTED))
        self._orphans = registry.counter(rows.ORPHANS)
        self._puts = _Children(registry.counter(rows.PUTS))
        self._written_bytes = _Children(registry.counter(rows.WRITE_SIZE))
        self._write_seconds = _Children(registry.histogram(rows.WRITE_DURATION))
        self._evictions = _Children(registry.counter(rows.EVICTIONS))
        self._evicted_bytes = _Children(registry.counter(rows.EVICTIONS_SIZE))
        self._deletions = registry.counter(rows.DELETIONS)

    @classmethod
    def start(cls, endpoint: str | None, instance: str) -> Self:
        """Return telemetry whose metrics Prometheus can read.

        Args:
            endpoint: Base URL of a collector (OTLP over HTTP), like http://collector:4318. None:
                nothing is sent, and no spans are made.
            instance: Name of the store among its peers.
        """
        registry = MetricRegistry(PART)
        spans = tracer(endpoint, PART, instance, exports_errors=True)
        return cls(registry, spans, export_metrics(endpoint, PART, instance, registry.collectors))

    @property
    def collectors(self) -> CollectorRegistry:
        """The metrics, for a server."""
        return self._registry.collectors

    def hit(self, tier: Tier, transport: str, num_bytes: int, seconds: float) -> None:
        """Count a value that was served."""
        self._hits.of(tier.value, transport).inc()
        self._read_bytes.of(tier.value, transport).inc(num_bytes)
        self._read_seconds.of(tier.value, transport).observe(seconds)

    def miss(self, reason: Miss) -> None:
        """Count a variant that was asked for and not served."""
        self._misses.of(reason.value).inc()

    def reported_uses(self, counted: int, unknown: int) -> None:
        """Count uses that engines reported, of variants that are stored and of others."""
        self._reported_uses.of("stored").inc(counted)
        self._reported_uses.of("not_stored").inc(unknown)

    def orphans_dropped(self, count: int) -> None:
        """Count variants that were dropped because their parent is gone."""
        self._orphans.inc(count)

    def put(
        self, outcome: PutOutcome, ack: Ack, transport: str, num_bytes: int, seconds: float
    ) -> None:
        """Count a put that has ended."""
        self._puts.of(outcome.value, ack.value, transport).inc()
        self._written_bytes.of(outcome.value, transport).inc(num_bytes)
        self._write_seconds.of(ack.value, transport).observe(seconds)

    def evicted(self, tier: Tier, policy: str, num_bytes: int) -> None:
        """Count a value that was evicted from a tier."""
        self._evictions.of(tier.value, policy).inc()
        self._evicted_bytes.of(tier.value, policy).inc(num_bytes)

    def deleted(self, num_variants: int) -> None:
        """Count the variants that a delete dropped."""
        self._deletions.inc(num_variants)

    def observe(self, read: Callable[[], StoreLevels]) -> None:
        """Call read for the store's levels whenever the metrics are read."""
        self._registry.observe(lambda: _levels(read()))

    def span(self, name: str, metadata: Headers = (), **attributes: Attribute) -> Span:
        """Return a child of the caller's span, or no span if the caller has none."""
        return self._tracer.start_child_of(name, metadata, SpanKind.SERVER, **attributes)

    def close(self) -> None:
        """Export what is left, within some seconds."""
        self._tracer.close()
        self._export.close()


def count_hit(span: Span, tier: Tier, num_bytes: int) -> None:
    """Add a served value to a call's span."""
    if span.is_recording:
        span.count(**{f"hits.{tier.value}": 1, "bytes": num_bytes})


def count_miss(span: Span, reason: Miss) -> None:
    """Add a variant that was not served to a call's span."""
    if span.is_recording:
        span.count(**{f"misses.{reason.value}": 1})


class _Children(Generic[Metric]):
    """The series of a metric by the values of its labels.

    A lookup here takes a tenth of the time of the library's own.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric: Metric = metric
        self._children: dict[tuple[str, ...], Metric] = {}

    def of(self, *values: str) -> Metric:
        """Return the series for these values of the labels."""
        child = self._children.get(values)
        if child is None:
            # Two threads that make it at once get the same one of the library.
            child = self._children[values] = self._metric.labels(*values)
        return child


def _levels(levels: StoreLevels) -> Iterator[Level]:
    memory, disk = (Tier.MEMORY.value,), (Tier.DISK.value,)
    yield rows.USED, memory, levels.memory_bytes
    yield rows.USED, disk, levels.disk_bytes
    yield rows.CAPACITY, memory, levels.memory_capacity_bytes
    yield rows.CAPACITY, disk, levels.disk_capacity_bytes
    yield rows.VARIANTS, (), levels.variants
    yield rows.LEASES, (), levels.leases
    yield rows.TOMBSTONES, (), levels.tombstones
    yield rows.UNWRITTEN, (), levels.unwritten
    yield rows.CONNECTIONS, (), levels.connections
    yield rows.CONNECTIONS_ENDED, ("evicted",), levels.connections_evicted
    yield rows.CONNECTIONS_ENDED, ("refused",), levels.connections_refused
    for precision, num_bytes in levels.bytes_by_precision.items():
        yield rows.PRECISION, (precision,), num_bytes
    for decade, count in enumerate(levels.score_histogram):
        yield rows.SCORE, (str(decade),), count
