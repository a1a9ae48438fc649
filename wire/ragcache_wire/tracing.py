"""OpenTelemetry spans for every service, exported by OTLP over HTTP.

A ``Tracer`` makes no spans. An ``ExportingTracer`` exports them. Only the second imports
OpenTelemetry, so a service without an endpoint pays one empty call for each span.

OpenTelemetry's own variables bound the export queue (``OTEL_BSP_*``) and the share of traces that
are sampled (``OTEL_TRACES_SAMPLER``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from enum import Enum
from typing import TYPE_CHECKING, Final, Self

from ragcache_core.errors import Unavailable
from ragcache_wire.trace_context import TRACEPARENT, TRACESTATE, headers_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan

EXPORT_TIMEOUT_S: Final = 3.0
"""Timeout of one export, and of the last one at shutdown."""

Headers = Iterable[tuple[str, str | bytes]]
"""Headers of a call as in gRPC metadata: the names are in lower case."""
Attribute = str | int | float | bool


class SpanKind(Enum):
    """The side of a call that a span describes. The names are those of OpenTelemetry."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CLIENT = "CLIENT"


class Span(AbstractContextManager["Span"]):
    """A span that records nothing.

    It ends with its ``with`` block or by a call of ``end``, on any thread.
    """

    is_recording = False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end(error)

    def set(self, **attributes: Attribute) -> None:
        """Set attributes. Empty strings are left out."""

    def count(self, **numbers: int) -> None:
        """Add to counters, which become attributes when the span ends."""

    def event(self, name: str, **attributes: Attribute) -> None:
        """Add an event that happened now."""

    def rename(self, name: str) -> None:
        """Change the name, when the right one was unknown at the start."""

    def fail(self, reason: str = "") -> None:
        """Set the status to error. The first reason stays."""

    def end(self, error: BaseException | None = None) -> None:
        """End the span once.

        Args:
            error: The exception that ended its ``with`` block, if any.
        """

    def current(self) -> AbstractContextManager[None]:
        """Return a context in which this span is the parent of calls and of ``start_child``."""
        return nullcontext()

    def headers(self) -> Mapping[str, str]:
        """Return the W3C trace context for calls. It is empty if nothing is recorded."""
        return {}


NO_SPAN: Final = Span()

_current: ContextVar[Span] = ContextVar("ragcache span", default=NO_SPAN)


def current_span() -> Span:
    """Return the span of the innermost ``current`` context."""
    return _current.get()


class Tracer:
    """Makes no spans. Safe for threads."""

    def start_request(self, name: str, headers: Headers, **attributes: Attribute) -> Span:
        """Start a server span as a child of the caller's span, or as the root of a new trace.

        If the caller's trace is not sampled, this span is not recorded.
        """
        return NO_SPAN

    def start_child_of(
        self,
        name: str,
        headers: Headers | None,
        kind: SpanKind = SpanKind.SERVER,
        **attributes: Attribute,
    ) -> Span:
        """Start a child of the caller's span. Without one, nothing is recorded."""
        return NO_SPAN

    def start_child(
        self, name: str, kind: SpanKind = SpanKind.INTERNAL, **attributes: Attribute
    ) -> Span:
        """Start a child of the current span. Without one, nothing is recorded."""
        return NO_SPAN

    def close(self) -> None:
        """Export the remaining spans within EXPORT_TIMEOUT_S."""


class ExportingTracer(Tracer):
    """Makes spans for the processors of a provider, which it owns.

    Args:
        scope: Name of the instrumentation scope.
        exports_errors: Whether spans carry the messages of errors. Messages may quote a prompt or
            a document, so by default spans carry only the error's type.
    """

    def __init__(
        self, provider: TracerProvider, scope: str, *, exports_errors: bool = False
    ) -> None:
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
            TraceContextTextMapPropagator,
        )

        self._provider = provider
        self._tracer = provider.get_tracer(scope)
        self._propagator = TraceContextTextMapPropagator()
        self._exports_errors = exports_errors

    @classmethod
    def for_endpoint(
        cls, endpoint: str, service: str, instance: str, *, exports_errors: bool = False
    ) -> Self:
        """Make a tracer that exports by OTLP over HTTP.

        Args:
            endpoint: Base URL, like http://collector:4318.
            service: Name of the service.
            instance: Name of this process among those of the service.
        """
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

        # The service calls close itself, within its own deadline.
        provider = TracerProvider(resource=resource(service, instance), shutdown_on_exit=False)
        url = f"{endpoint.rstrip('/')}/v1/traces"
        exporter = OTLPSpanExporter(url, timeout=EXPORT_TIMEOUT_S)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider, f"ragcache.{service}", exports_errors=exports_errors)

    def start_request(self, name: str, headers: Headers, **attributes: Attribute) -> Span:
        """See Tracer."""
        parent = self._propagator.extract(_carrier(headers))
        return self._start(name, parent, SpanKind.SERVER, attributes)

    def start_child_of(
        self,
        name: str,
        headers: Headers | None,
        kind: SpanKind = SpanKind.SERVER,
        **attributes: Attribute,
    ) -> Span:
        """See Tracer."""
        carrier = _carrier(headers or ())
        if TRACEPARENT not in carrier:
            return NO_SPAN
        from opentelemetry.trace import get_current_span  # noqa: PLC0415

        parent = self._propagator.extract(carrier)
        if not get_current_span(parent).get_span_context().is_valid:
            return NO_SPAN
        return self._start(name, parent, kind, attributes)

    def start_child(
        self, name: str, kind: SpanKind = SpanKind.INTERNAL, **attributes: Attribute
    ) -> Span:
        """See Tracer."""
        parent = current_span()
        if not isinstance(parent, _RecordedSpan):
            return NO_SPAN
        return self._start(name, parent.context(), kind, attributes)

    def close(self) -> None:
        """See Tracer."""
        self._provider.shutdown()

    def _start(
        self, name: str, parent: Context, kind: SpanKind, attributes: Mapping[str, Attribute]
    ) -> Span:
        from opentelemetry import trace  # noqa: PLC0415

        span = self._tracer.start_span(name, parent, trace.SpanKind[kind.value], attributes)
        return _RecordedSpan(span, self._exports_errors) if span.is_recording() else NO_SPAN


class _RecordedSpan(Span):
    """A span that OpenTelemetry records."""

    is_recording = True

    def __init__(self, span: OtelSpan, exports_errors: bool) -> None:
        self._span = span
        self._exports_errors = exports_errors
        self._counts: dict[str, int] = {}
        self._has_ended = False
        self._has_failed = False
        self._lock = threading.Lock()

    def set(self, **attributes: Attribute) -> None:
        """See Span."""
        self._span.set_attributes({k: v for k, v in attributes.items() if v != ""})

    def count(self, **numbers: int) -> None:
        """See Span."""
        for name, number in numbers.items():
            self._counts[name] = self._counts.get(name, 0) + number

    def event(self, name: str, **attributes: Attribute) -> None:
        """See Span."""
        self._span.add_event(name, attributes)

    def rename(self, name: str) -> None:
        """See Span."""
        self._span.update_name(name)

    def fail(self, reason: str = "") -> None:
        """See Span."""
        from opentelemetry.trace import StatusCode  # noqa: PLC0415

        if self._has_failed:
            return
        self._has_failed = True
        self._span.set_status(StatusCode.ERROR, reason)

    def end(self, error: BaseException | None = None) -> None:
        """See Span."""
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
        if isinstance(error, Exception):
            self._fail_with(error)
        elif error is not None:  # the caller cancelled, which is no failure
            self._span.set_attribute("cancelled", True)
        self._span.set_attributes(self._counts)
        self._span.end()

    @contextmanager
    def current(self) -> Iterator[None]:
        """See Span."""
        from opentelemetry.trace import use_span  # noqa: PLC0415

        before = _current.set(self)
        try:
            with use_span(self._span, record_exception=False, set_status_on_exception=False):
                yield
        finally:
            _current.reset(before)

    def headers(self) -> Mapping[str, str]:
        """See Span."""
        return headers_of(self._span)

    def context(self) -> Context:
        """Return the OpenTelemetry context of its children."""
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415

        return set_span_in_context(self._span)

    def _fail_with(self, error: Exception) -> None:
        kind = type(error).__name__
        self._span.set_attribute("error.type", kind)
        if self._exports_errors:
            self._span.record_exception(error)
            self.fail(f"{kind}: {error}")
        else:
            self.fail(f"{kind}: {error.component}" if isinstance(error, Unavailable) else kind)


def tracer(endpoint: str | None, service: str, instance: str) -> Tracer:
    """Return the tracer of a service. Without an endpoint it makes no spans."""
    return ExportingTracer.for_endpoint(endpoint, service, instance) if endpoint else Tracer()


def resource(service: str, instance: str) -> Resource:
    """Return the OpenTelemetry resource of a service."""
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415

    return Resource.create({"service.name": f"ragcache-{service}", "service.instance.id": instance})


def _carrier(headers: Headers) -> dict[str, str]:
    wanted = (TRACEPARENT, TRACESTATE)
    return {name: value for name, value in headers if name in wanted and isinstance(value, str)}
