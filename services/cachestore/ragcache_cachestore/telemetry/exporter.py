"""The telemetry of a store: metrics of its catalogue, and spans over OTLP/HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Generic, Self, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram

from ragcache_core.identity.variant import Miss, Tier
from ragcache_core.store_api import Ack, PutOutcome
from ragcache_wire.telemetry.catalogue import cachestore as rows
from ragcache_wire.telemetry.catalogue.cachestore import Undecrypted
from ragcache_wire.telemetry.metric_registry import (
    Level,
    MetricRegistry,
    MetricsExport,
    NoMetricsExport,
    export_metrics,
)
from ragcache_wire.tracing import Attribute, Headers, Span, SpanKind, Tracer, tracer
from ragcache_wire.v1 import cachestore_pb2 as pb

PART: Final = "cachestore"

Metric = TypeVar("Metric", Counter, Histogram)


class Telemetry:
    """Counts what happens, and makes the spans of calls. Safe to use from any thread.

    Args:
        tracer: Makes the spans. None: there are none.
        export: Sends the metrics elsewhere. Prometheus reads ``collectors``.
    """

    def __init__(self, tracer: Tracer | None = None, export: MetricsExport | None = None) -> None:
        registry = self._registry = MetricRegistry(PART)
        self._tracer = tracer or Tracer()
        self._export = export or NoMetricsExport()
        self._hits = _Children(registry.counter(rows.HITS))
        self._read_bytes = _Children(registry.counter(rows.READ_SIZE))
        self._read_seconds = _Children(registry.histogram(rows.READ_DURATION))
        self._misses = _Children(registry.counter(rows.MISSES))
        self._reported_uses = _Children(registry.counter(rows.USES_REPORTED))
        self._orphans = registry.counter(rows.ORPHANS)
        self._undecrypted = _Children(registry.counter(rows.UNDECRYPTED))
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
        telemetry = cls(tracer(endpoint, PART, instance, exports_errors=True))
        telemetry._export = export_metrics(endpoint, PART, instance, telemetry.collectors)
        return telemetry

    @property
    def collectors(self) -> CollectorRegistry:
        """The metrics, for a server."""
        return self._registry.collectors

    def hit(self, tier: Tier, transport: str, num_bytes: int, seconds: float) -> None:
        """Count a value that was served.

        Args:
            seconds: From the call until the last byte was handed over.
        """
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

    def undecrypted(self, reason: Undecrypted, count: int) -> None:
        """Count values on disk that were dropped because no key decrypts them."""
        self._undecrypted.of(reason.value).inc(count)

    def put(
        self, outcome: PutOutcome, ack: Ack, transport: str, num_bytes: int, seconds: float
    ) -> None:
        """Count a put that has ended.

        Args:
            seconds: From the call until it was acknowledged.
        """
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

    def observe(self, read: Callable[[], pb.StatsReply]) -> None:
        """Call read for the store's sizes whenever the metrics are read, in any thread."""
        self._registry.observe(lambda: _levels(read()))

    def span(self, name: str, metadata: Headers = (), **attributes: Attribute) -> Span:
        """Return a span for a block, as a child of the caller's (W3C ``traceparent`` in metadata).

        A call without a trace context makes no span, so clients decide what is traced. An
        exception that leaves the block is recorded.
        """
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


def _levels(levels: pb.StatsReply) -> Iterator[Level]:
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
