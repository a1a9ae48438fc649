"""What a store says about itself while it runs: OpenTelemetry metrics and spans, over OTLP/HTTP.

``Telemetry`` is what the rest of the store calls, and does nothing; ``ExportingTelemetry`` is the
same with a backend behind it. OpenTelemetry is imported only for the second, so that a store
without an endpoint pays an empty call for each event and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from ragcache_core.storing import Ack, PutOutcome
from ragcache_core.variant import Miss, Tier

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan

EXPORT_INTERVAL_S: Final = 15.0
"""Between two exports of metrics: what most backends scrape at."""
_TIMEOUT_S: Final = 3.0
"""For one export, and for the last one when the store ends."""
_SCOPE: Final = "ragcache.cachestore"
_PREFIX: Final = "ragcache.store"
_TRACE_HEADERS: Final = ("traceparent", "tracestate")
_DURATION_BOUNDS_S: Final = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)
"""From a memory hit of one small chunk over shared memory to a cold disk behind a slow network."""

Metadata = Iterable[tuple[str, str | bytes]]
"""Of a call, as gRPC has it: names in lower case."""
Attribute = str | int | float | bool

NO_SPAN: Final[AbstractContextManager[None]] = nullcontext()


@dataclass(frozen=True, slots=True)
class Levels:
    """How a store stands at one moment; sizes in bytes.

    bytes_by_precision: of values held, by "key/value" of their codecs. score_histogram: how many
    variants have a score in each power of ten, lowest first.
    """

    variants: int
    memory_bytes: int
    memory_capacity_bytes: int
    disk_bytes: int
    disk_capacity_bytes: int
    leases: int
    tombstones: int
    unwritten: int
    bytes_by_precision: Mapping[str, int]
    score_histogram: Sequence[int]


class Telemetry:
    """Telemetry that goes nowhere. Every method is safe to call from any thread."""

    def hit(self, tier: Tier, lane: str, num_bytes: int, seconds: float) -> None:
        """A value was served. seconds: from the call until its last byte was handed over."""

    def miss(self, reason: Miss) -> None:
        """A variant that was asked for was not served."""

    def put(self, outcome: PutOutcome, ack: Ack, lane: str, num_bytes: int, seconds: float) -> None:
        """A put ended. seconds: from the call until it was acknowledged."""

    def evicted(self, tier: Tier, policy: str, num_bytes: int) -> None:
        """A value left a tier to make room there."""

    def deleted(self, num_variants: int) -> None:
        """A delete dropped so many variants."""

    def observe(self, read: Callable[[], Levels]) -> None:
        """Ask read for the store's levels at each export, in a thread of its own."""

    def span(
        self, name: str, metadata: Metadata = (), **attributes: Attribute
    ) -> AbstractContextManager[Span | None]:
        """A span around a block, below the caller's own (W3C ``traceparent`` in metadata).

        A call that is not part of a trace makes none: who asks decides what is traced. An
        exception that leaves the block is recorded.
        """
        return NO_SPAN

    def close(self) -> None:
        """Send what is left, within some seconds."""


class ExportingTelemetry(Telemetry):
    """Telemetry for the providers' readers and processors. Owns both providers."""

    def __init__(self, meters: MeterProvider, tracers: TracerProvider) -> None:
        self._meters = meters
        self._tracers = tracers
        self._tracer = tracers.get_tracer(_SCOPE)
        meter = meters.get_meter(_SCOPE)
        self._meter = meter
        self._hits = _Sum("tier", "lane")
        self._read_bytes = _Sum("tier", "lane")
        self._misses = _Sum("reason")
        self._puts = _Sum("outcome", "ack", "lane")
        self._written_bytes = _Sum("outcome", "lane")
        self._evictions = _Sum("tier", "policy")
        self._evicted_bytes = _Sum("tier", "policy")
        self._deletions = _Sum()
        for name, unit, description, sum_ in (
            ("hits", "{value}", "Values served", self._hits),
            ("read.size", "By", "Bytes of values served", self._read_bytes),
            ("misses", "{value}", "Variants asked for and not served", self._misses),
            ("puts", "{value}", "Puts that ended", self._puts),
            ("write.size", "By", "Bytes of values put", self._written_bytes),
            ("evictions", "{value}", "Values that made room", self._evictions),
            ("evictions.size", "By", "Bytes of values that made room", self._evicted_bytes),
            ("deletions", "{variant}", "Variants that deletes dropped", self._deletions),
        ):
            meter.create_observable_counter(f"{_PREFIX}.{name}", [sum_.seen], unit, description)
        self._read_seconds = meter.create_histogram(
            f"{_PREFIX}.read.duration",
            "s",
            "From the call until the last byte was handed over",
            explicit_bucket_boundaries_advisory=_DURATION_BOUNDS_S,
        )
        self._write_seconds = meter.create_histogram(
            f"{_PREFIX}.write.duration",
            "s",
            "From the call until the acknowledgement",
            explicit_bucket_boundaries_advisory=_DURATION_BOUNDS_S,
        )

    @classmethod
    def to(cls, endpoint: str, instance: str) -> Self:
        """Telemetry exported by OTLP over HTTP.

        endpoint: base URL, like http://collector:4318. instance: the store's name among its peers.
        """
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import (  # noqa: PLC0415
            OTLPMetricExporter,
        )
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415
        from opentelemetry.sdk.metrics.export import (  # noqa: PLC0415
            PeriodicExportingMetricReader,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

        base = endpoint.rstrip("/")
        resource = Resource.create(
            {"service.name": "ragcache-cachestore", "service.instance.id": instance}
        )
        reader = PeriodicExportingMetricReader(
            OTLPMetricExporter(f"{base}/v1/metrics", timeout=_TIMEOUT_S),
            export_interval_millis=EXPORT_INTERVAL_S * 1000,
            export_timeout_millis=_TIMEOUT_S * 1000,
        )
        # At the end of the process the store closes it in its own time, not the interpreter.
        meters = MeterProvider([reader], resource, shutdown_on_exit=False)
        tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(f"{base}/v1/traces", timeout=_TIMEOUT_S)
        tracers.add_span_processor(BatchSpanProcessor(exporter))
        return cls(meters, tracers)

    def hit(self, tier: Tier, lane: str, num_bytes: int, seconds: float) -> None:
        """A value was served."""
        self._hits.add(1, tier.value, lane)
        self._read_bytes.add(num_bytes, tier.value, lane)
        self._read_seconds.record(seconds, {"tier": tier.value, "lane": lane})

    def miss(self, reason: Miss) -> None:
        """A variant that was asked for was not served."""
        self._misses.add(1, reason.value)

    def put(self, outcome: PutOutcome, ack: Ack, lane: str, num_bytes: int, seconds: float) -> None:
        """A put ended."""
        self._puts.add(1, outcome.value, ack.value, lane)
        self._written_bytes.add(num_bytes, outcome.value, lane)
        self._write_seconds.record(seconds, {"ack": ack.value, "lane": lane})

    def evicted(self, tier: Tier, policy: str, num_bytes: int) -> None:
        """A value left a tier to make room there."""
        self._evictions.add(1, tier.value, policy)
        self._evicted_bytes.add(num_bytes, tier.value, policy)

    def deleted(self, num_variants: int) -> None:
        """A delete dropped so many variants."""
        self._deletions.add(num_variants)

    def observe(self, read: Callable[[], Levels]) -> None:
        """Ask read for the store's levels at each export."""
        once = _Once(read)
        for gauge in _GAUGES:
            gauge.create(self._meter, once.read)

    def span(
        self, name: str, metadata: Metadata = (), **attributes: Attribute
    ) -> AbstractContextManager[Span | None]:
        """A span below the caller's own; none where the caller has none."""
        carrier = {k: v for k, v in metadata if k in _TRACE_HEADERS and isinstance(v, str)}
        if "traceparent" not in carrier:
            return NO_SPAN
        return self._span(name, carrier, attributes)

    def _span(
        self, name: str, carrier: Mapping[str, str], attributes: Mapping[str, Attribute]
    ) -> AbstractContextManager[Span | None]:
        from opentelemetry.trace import SpanKind, get_current_span  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
            TraceContextTextMapPropagator,
        )

        parent = TraceContextTextMapPropagator().extract(carrier)
        if not get_current_span(parent).get_span_context().is_valid:
            return NO_SPAN
        return Span(self._tracer.start_span(name, parent, SpanKind.SERVER, attributes))

    def close(self) -> None:
        """Send what is left, within some seconds."""
        self._tracers.shutdown()
        self._meters.shutdown(timeout_millis=_TIMEOUT_S * 1000)


class Span(AbstractContextManager["Span"]):
    """A span that ends with its block.

    It is never the current one: a stream that is let go of ends in another context than it began.
    """

    def __init__(self, span: OtelSpan) -> None:
        self._span = span
        self._counts: dict[str, int] = {}

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            from opentelemetry.trace import StatusCode  # noqa: PLC0415

            self._span.record_exception(error)
            self._span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}")
        elif error is not None:  # its caller has gone, which is nobody's failure
            self._span.set_attribute("cancelled", True)
        self._span.set_attributes(self._counts)
        self._span.end()

    def set(self, **attributes: Attribute) -> None:
        """Say more than was known at its begin."""
        self._span.set_attributes(attributes)

    def hit(self, tier: Tier, num_bytes: int) -> None:
        """A value was served, of so many bytes."""
        self._count(f"hits.{tier.value}", 1)
        self._count("bytes", num_bytes)

    def miss(self, reason: Miss) -> None:
        """A variant that was asked for was not served."""
        self._count(f"misses.{reason.value}", 1)

    def _count(self, name: str, number: int) -> None:
        self._counts[name] = self._counts.get(name, 0) + number


class _Sum:
    """A sum that only grows, for each combination of attributes.

    To add costs half a microsecond, where a counter of OpenTelemetry's own takes seven; those are
    made of it when somebody looks.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._lock = threading.Lock()
        self._sums: dict[tuple[str, ...], int] = {}

    def add(self, number: int, *values: str) -> None:
        """Add a number where the attributes have these values."""
        with self._lock:
            self._sums[values] = self._sums.get(values, 0) + number

    def seen(self, _: CallbackOptions) -> list[Observation]:
        """The sums, as an instrument's callback."""
        from opentelemetry.metrics import Observation as Seen  # noqa: PLC0415

        with self._lock:
            sums = list(self._sums.items())
        return [Seen(sum_, dict(zip(self._names, at, strict=True))) for at, sum_ in sums]


class _Once:
    """Levels read once for all gauges of an export: drawing them up looks at every variant."""

    def __init__(self, read: Callable[[], Levels]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._kept: tuple[float, Levels] | None = None

    def read(self) -> Levels:
        """The levels, at most a second old."""
        with self._lock:
            now = time.monotonic()
            if self._kept is None or now - self._kept[0] > 1.0:
                self._kept = (now, self._read())
            return self._kept[1]


_Series = Iterable[tuple[float, Mapping[str, Attribute]]]


@dataclass(frozen=True, slots=True)
class _Gauge:
    """One figure of the levels. series: its values, each with what tells it from the others."""

    name: str
    unit: str
    description: str
    series: Callable[[Levels], _Series]

    def create(self, meter: Meter, read: Callable[[], Levels]) -> None:
        """Export it from what read says."""
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
        "Bytes of values held, by tier",
        lambda levels: _by_tier(levels.memory_bytes, levels.disk_bytes),
    ),
    _Gauge(
        "capacity",
        "By",
        "Bytes that a tier may hold",
        lambda levels: _by_tier(levels.memory_capacity_bytes, levels.disk_capacity_bytes),
    ),
    _Gauge(
        "variants",
        "{variant}",
        "Variants held",
        lambda levels: [(levels.variants, {})],
    ),
    _Gauge(
        "leases",
        "{lease}",
        "Values being read",
        lambda levels: [(levels.leases, {})],
    ),
    _Gauge(
        "tombstones",
        "{tombstone}",
        "Deletes that are remembered",
        lambda levels: [(levels.tombstones, {})],
    ),
    _Gauge(
        "unwritten",
        "{variant}",
        "Values whose write to disk is still to come",
        lambda levels: [(levels.unwritten, {})],
    ),
    _Gauge(
        "precision",
        "By",
        "Bytes of values held, by the codecs of keys and values",
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
