"""The telemetry of a store: OpenTelemetry metrics and spans, over OTLP/HTTP.

``Telemetry`` does nothing, and ``ExportingTelemetry`` exports. Only the second imports
OpenTelemetry, so a store without an endpoint pays an empty call for each event.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from ragcache_core.identity.variant import Miss, Tier
from ragcache_core.store_api import Ack, PutOutcome
from ragcache_wire.tracing import (
    EXPORT_TIMEOUT_S,
    NO_SPAN,
    Attribute,
    Headers,
    Span,
    SpanKind,
    Tracer,
    resource,
    tracer,
)

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
    from opentelemetry.sdk.metrics import MeterProvider

EXPORT_INTERVAL_S: Final = 15.0
"""Interval of the exports of metrics, as most backends use."""
_PART: Final = "cachestore"
_SCOPE: Final = "ragcache.cachestore"
_PREFIX: Final = "ragcache.store"
_DURATION_BOUNDS_S: Final = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)
"""From a memory hit of a small chunk over shared memory, to a cold disk and a slow network."""


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
        """Call read for the store's levels at each export, in a background thread."""

    def span(self, name: str, metadata: Headers = (), **attributes: Attribute) -> Span:
        """Return a span for a block, as a child of the caller's (W3C ``traceparent`` in metadata).

        A call without a trace context makes no span, so clients decide what is traced. An
        exception that leaves the block is recorded.
        """
        return NO_SPAN

    def close(self) -> None:
        """Export what is left, within some seconds."""


class ExportingTelemetry(Telemetry):
    """Telemetry for the readers of meters, and spans of tracer. Owns both."""

    def __init__(self, meters: MeterProvider, tracer: Tracer) -> None:
        self._meters = meters
        self._tracer = tracer
        meter = meters.get_meter(_SCOPE)
        self._meter = meter
        self._hits = _Sum("tier", "transport")
        self._read_bytes = _Sum("tier", "transport")
        self._misses = _Sum("reason")
        self._reported_uses = _Sum("outcome")
        self._orphans = _Sum()
        self._puts = _Sum("outcome", "ack", "transport")
        self._written_bytes = _Sum("outcome", "transport")
        self._evictions = _Sum("tier", "policy")
        self._evicted_bytes = _Sum("tier", "policy")
        self._deletions = _Sum()
        for name, unit, description, sum_ in (
            ("hits", "{value}", "Values served", self._hits),
            ("read.size", "By", "Bytes of values served", self._read_bytes),
            ("misses", "{value}", "Variants asked for and not served", self._misses),
            ("uses.reported", "{use}", "Uses that engines reported", self._reported_uses),
            ("orphans", "{variant}", "Variants dropped without their parent", self._orphans),
            ("puts", "{value}", "Puts that have ended", self._puts),
            ("write.size", "By", "Bytes of values put", self._written_bytes),
            ("evictions", "{value}", "Evicted values", self._evictions),
            ("evictions.size", "By", "Bytes of evicted values", self._evicted_bytes),
            ("deletions", "{variant}", "Variants that deletes removed", self._deletions),
        ):
            meter.create_observable_counter(f"{_PREFIX}.{name}", [sum_.seen], unit, description)
        self._read_seconds = meter.create_histogram(
            f"{_PREFIX}.read.duration",
            "s",
            "Time from the call until the last byte was handed over",
            explicit_bucket_boundaries_advisory=_DURATION_BOUNDS_S,
        )
        self._write_seconds = meter.create_histogram(
            f"{_PREFIX}.write.duration",
            "s",
            "Time from the call until the acknowledgement",
            explicit_bucket_boundaries_advisory=_DURATION_BOUNDS_S,
        )

    @classmethod
    def to(cls, endpoint: str, instance: str) -> Self:
        """Return telemetry that exports by OTLP over HTTP.

        Args:
            endpoint: Base URL, like http://collector:4318.
            instance: Name of the store among its peers.
        """
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import (  # noqa: PLC0415
            OTLPMetricExporter,
        )
        from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415
        from opentelemetry.sdk.metrics.export import (  # noqa: PLC0415
            PeriodicExportingMetricReader,
        )

        reader = PeriodicExportingMetricReader(
            OTLPMetricExporter(f"{endpoint.rstrip('/')}/v1/metrics", timeout=EXPORT_TIMEOUT_S),
            export_interval_millis=EXPORT_INTERVAL_S * 1000,
            export_timeout_millis=EXPORT_TIMEOUT_S * 1000,
        )
        # The store closes it, not the interpreter at exit.
        meters = MeterProvider([reader], resource(_PART, instance), shutdown_on_exit=False)
        return cls(meters, tracer(endpoint, _PART, instance, exports_errors=True))

    def hit(self, tier: Tier, transport: str, num_bytes: int, seconds: float) -> None:
        """Count a value that was served."""
        self._hits.add(1, tier.value, transport)
        self._read_bytes.add(num_bytes, tier.value, transport)
        self._read_seconds.record(seconds, {"tier": tier.value, "transport": transport})

    def miss(self, reason: Miss) -> None:
        """Count a variant that was asked for and not served."""
        self._misses.add(1, reason.value)

    def reported_uses(self, counted: int, unknown: int) -> None:
        """Count uses that engines reported, of variants that are stored and of others."""
        self._reported_uses.add(counted, "stored")
        self._reported_uses.add(unknown, "not_stored")

    def orphans_dropped(self, count: int) -> None:
        """Count variants that were dropped because their parent is gone."""
        self._orphans.add(count)

    def put(
        self, outcome: PutOutcome, ack: Ack, transport: str, num_bytes: int, seconds: float
    ) -> None:
        """Count a put that has ended."""
        self._puts.add(1, outcome.value, ack.value, transport)
        self._written_bytes.add(num_bytes, outcome.value, transport)
        self._write_seconds.record(seconds, {"ack": ack.value, "transport": transport})

    def evicted(self, tier: Tier, policy: str, num_bytes: int) -> None:
        """Count a value that was evicted from a tier."""
        self._evictions.add(1, tier.value, policy)
        self._evicted_bytes.add(num_bytes, tier.value, policy)

    def deleted(self, num_variants: int) -> None:
        """Count the variants that a delete dropped."""
        self._deletions.add(num_variants)

    def observe(self, read: Callable[[], StoreLevels]) -> None:
        """Call read for the store's levels at each export."""
        once = _Once(read)
        for gauge in _GAUGES:
            gauge.create(self._meter, once.read)

    def span(self, name: str, metadata: Headers = (), **attributes: Attribute) -> Span:
        """Return a child of the caller's span, or no span if the caller has none."""
        return self._tracer.start_child_of(name, metadata, SpanKind.SERVER, **attributes)

    def close(self) -> None:
        """Export what is left, within some seconds."""
        self._tracer.close()
        self._meters.shutdown(timeout_millis=EXPORT_TIMEOUT_S * 1000)


def count_hit(span: Span, tier: Tier, num_bytes: int) -> None:
    """Add a served value to a call's span."""
    if span.is_recording:
        span.count(**{f"hits.{tier.value}": 1, "bytes": num_bytes})


def count_miss(span: Span, reason: Miss) -> None:
    """Add a variant that was not served to a call's span."""
    if span.is_recording:
        span.count(**{f"misses.{reason.value}": 1})


class _Sum:
    """A sum that only grows, for each combination of attributes.

    An addition takes half a microsecond, where a counter of OpenTelemetry takes seven. The
    OpenTelemetry values are made at export.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._lock = threading.Lock()
        self._sums: dict[tuple[str, ...], int] = {}

    def add(self, number: int, *values: str) -> None:
        """Add a number for these values of the attributes."""
        with self._lock:
            self._sums[values] = self._sums.get(values, 0) + number

    def seen(self, _: CallbackOptions) -> list[Observation]:
        """Return the sums, as the callback of an instrument."""
        from opentelemetry.metrics import Observation as Seen  # noqa: PLC0415

        with self._lock:
            sums = list(self._sums.items())
        return [Seen(sum_, dict(zip(self._names, at, strict=True))) for at, sum_ in sums]


class _Once:
    """Reads the levels once for all gauges of an export, because that visits every variant."""

    def __init__(self, read: Callable[[], StoreLevels]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._kept: tuple[float, StoreLevels] | None = None

    def read(self) -> StoreLevels:
        """Return the levels, at most a second old."""
        with self._lock:
            now = time.monotonic()
            if self._kept is None or now - self._kept[0] > 1.0:
                self._kept = (now, self._read())
            return self._kept[1]


_Series = Iterable[tuple[float, Mapping[str, Attribute]]]


@dataclass(frozen=True, slots=True)
class _Gauge:
    """One number of the levels.

    Attributes:
        series: Returns the values, each with its attributes.
    """

    name: str
    unit: str
    description: str
    series: Callable[[StoreLevels], _Series]

    def create(self, meter: Meter, read: Callable[[], StoreLevels]) -> None:
        """Export the gauge, from the levels that read returns."""
        from opentelemetry.metrics import Observation as Seen  # noqa: PLC0415

        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [Seen(value, attributes) for value, attributes in self.series(read())]

        meter.create_observable_gauge(
            f"{_PREFIX}.{self.name}", [observe], self.unit, self.description
        )


def _by_tier(memory: int, disk: int) -> _Series:
    return [(memory, {"tier": Tier.MEMORY.value}), (disk, {"tier": Tier.DISK.value})]


_GAUGES: Final = (
    _Gauge(
        "used",
        "By",
        "Bytes of stored values, by tier",
        lambda levels: _by_tier(levels.memory_bytes, levels.disk_bytes),
    ),
    _Gauge(
        "capacity",
        "By",
        "Capacity of a tier in bytes",
        lambda levels: _by_tier(levels.memory_capacity_bytes, levels.disk_capacity_bytes),
    ),
    _Gauge(
        "variants",
        "{variant}",
        "Stored variants",
        lambda levels: [(levels.variants, {})],
    ),
    _Gauge(
        "leases",
        "{lease}",
        "Open leases",
        lambda levels: [(levels.leases, {})],
    ),
    _Gauge(
        "tombstones",
        "{tombstone}",
        "Remembered deletes",
        lambda levels: [(levels.tombstones, {})],
    ),
    _Gauge(
        "unwritten",
        "{variant}",
        "Writes to disk that are queued or running",
        lambda levels: [(levels.unwritten, {})],
    ),
    _Gauge(
        "connections",
        "{connection}",
        "Open connections of the data transports",
        lambda levels: [(levels.connections, {})],
    ),
    _Gauge(
        "connections.ended",
        "{connection}",
        "Connections that were evicted or refused since the start, because there were too many",
        lambda levels: [
            (levels.connections_evicted, {"reason": "evicted"}),
            (levels.connections_refused, {"reason": "refused"}),
        ],
    ),
    _Gauge(
        "precision",
        "By",
        "Bytes of stored values, by the codecs of keys and values",
        lambda levels: [
            (num_bytes, {"precision": precision})
            for precision, num_bytes in levels.bytes_by_precision.items()
        ],
    ),
    _Gauge(
        "score",
        "{variant}",
        "Variants by the power of ten of their score",
        lambda levels: [
            (count, {"decade": decade}) for decade, count in enumerate(levels.score_histogram)
        ],
    ),
)
