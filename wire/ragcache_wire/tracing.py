"""OpenTelemetry spans for every service, exported by OTLP over HTTP.

The API of OpenTelemetry makes no spans without its SDK. Only ``tracer`` with an endpoint imports
the SDK. OpenTelemetry's own variables bound the export queue (``OTEL_BSP_*``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ragcache_core.errors import Unavailable
from ragcache_wire.telemetry.semantic_conventions import KIND_CHAIN, SCHEMA_URL, SPAN_KIND

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider


PROPAGATOR: Final = TraceContextTextMapPropagator()
TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

Metadata = tuple[tuple[str, str], ...] | None
"""Metadata of a gRPC call."""


def traceparent() -> str:
    """Return the current span as a traceparent; "" if there is none or it is not sampled."""
    return headers_of(trace.get_current_span()).get(TRACEPARENT, "")


def metadata(parent: str) -> Metadata:
    """Return gRPC metadata with a traceparent; None for ""."""
    return ((TRACEPARENT, parent),) if parent else None


def current_metadata() -> Metadata:
    """Return gRPC metadata with the current span's traceparent and tracestate."""
    return tuple(headers_of(trace.get_current_span()).items()) or None


def headers_of(span: trace.Span) -> dict[str, str]:
    """Return the trace context headers of a span; none if it is not sampled."""
    context = span.get_span_context()
    if not (context.is_valid and context.trace_flags.sampled):
        return {}
    carrier: dict[str, str] = {}
    PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return carrier


__all__ = [
    "NO_SPAN",
    "Attribute",
    "Headers",
    "Span",
    "SpanKind",
    "Tracer",
    "current_span",
    "tracer",
]

EXPORT_TIMEOUT_S: Final = 3.0
"""Timeout of one export, and of the last one at shutdown."""

MAX_CONTENT_CHARS: Final = 16_384
"""Longest text in an attribute. The rest is left out."""

Headers = Iterable[tuple[str, str | bytes]]
"""Headers of a call as in gRPC metadata: the names are in lower case."""
Attribute = str | int | float | bool | tuple[str, ...]


class Span(AbstractContextManager["Span"]):
    """A span of OpenTelemetry that adds counters and keeps error messages to itself.

    It ends with its ``with`` block or by a call of ``end``, on any thread.

    Args:
        span: The span of OpenTelemetry. The default records nothing.
        started_ns: When it began, in nanoseconds of Unix time.
    """

    def __init__(
        self,
        span: trace.Span = trace.INVALID_SPAN,
        started_ns: int = 0,
        *,
        exports_errors: bool = False,
        exports_content: bool = False,
    ) -> None:
        self.is_recording = span.is_recording()
        self.has_content = self.is_recording and exports_content
        self.started_ns = started_ns
        self._span = span
        self._exports_errors = exports_errors
        self._counts: dict[str, int] = {}
        self._has_ended = not self.is_recording
        self._has_failed = False
        self._lock = threading.Lock()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.end(error)

    def set(self, **attributes: Attribute) -> None:
        """Set attributes. Empty strings are left out."""
        self._span.set_attributes({k: v for k, v in attributes.items() if v != ""})

    def set_content(self, **texts: str) -> None:
        """Set attributes with text of users or documents, if the tracer exports content."""
        if self.has_content:
            self.set(**{name: text[:MAX_CONTENT_CHARS] for name, text in texts.items()})

    def count(self, **numbers: int) -> None:
        """Add to counters, which become attributes when the span ends."""
        if self.is_recording:
            for name, number in numbers.items():
                self._counts[name] = self._counts.get(name, 0) + number

    def event(self, name: str, **attributes: Attribute) -> None:
        """Add an event that happened now."""
        self._span.add_event(name, attributes)

    def rename(self, name: str) -> None:
        """Change the name, when the right one was unknown at the start."""
        self._span.update_name(name)

    def fail(self, reason: str = "") -> None:
        """Set the status to error. The first reason stays."""
        if self.is_recording and not self._has_failed:
            self._has_failed = True
            self._span.set_status(StatusCode.ERROR, reason)

    def end(self, error: BaseException | None = None, ended_ns: int | None = None) -> None:
        """End the span once.

        Args:
            error: The exception that ended its ``with`` block, if any.
            ended_ns: When it ended, in nanoseconds of Unix time. None: now.
        """
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
        if isinstance(error, Exception):
            self._fail_with(error)
        elif error is not None:  # the caller cancelled, which is no failure
            self._span.set_attribute("cancelled", True)
        self._span.set_attributes(self._counts)
        self._span.end(ended_ns)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Return a context in which this span is the parent of calls and of ``start_child``."""
        if not self.is_recording:
            yield
            return
        before = _current.set(self)
        try:
            with trace.use_span(self._span, record_exception=False, set_status_on_exception=False):
                yield
        finally:
            _current.reset(before)

    def headers(self) -> Mapping[str, str]:
        """Return the W3C trace context for calls. It is empty if nothing is recorded."""
        return headers_of(self._span)

    def context(self) -> Context:
        """Return the OpenTelemetry context of its children."""
        return trace.set_span_in_context(self._span)

    def _fail_with(self, error: Exception) -> None:
        kind = type(error).__name__
        self._span.set_attribute("error.type", kind)
        if self._exports_errors:
            self._span.record_exception(error)
            self.fail(f"{kind}: {error}")
        else:
            self.fail(f"{kind}: {error.component}" if isinstance(error, Unavailable) else kind)


NO_SPAN: Final = Span()

_current: ContextVar[Span] = ContextVar("ragcache span", default=NO_SPAN)


def current_span() -> Span:
    """Return the span of the innermost ``current`` context."""
    return _current.get()


class Tracer:
    """Starts the spans of a service. Safe for threads.

    Args:
        provider: The SDK's provider, which this object owns. None: no span is recorded.
        scope: Name of the instrumentation scope.
        exports_errors: Whether spans carry the messages of errors. Messages may quote a prompt or
            a document, so by default spans carry only the error's type.
        exports_content: Whether spans carry text of questions, answers and documents.
    """

    def __init__(
        self,
        provider: TracerProvider | None = None,
        scope: str = "ragcache",
        *,
        exports_errors: bool = False,
        exports_content: bool = False,
    ) -> None:
        self._provider = provider
        self._tracer = None
        if provider is not None:
            self._tracer = provider.get_tracer(scope, schema_url=SCHEMA_URL)
        self._exports_errors = exports_errors
        self._exports_content = exports_content

    def start_request(self, name: str, headers: Headers, **attributes: Attribute) -> Span:
        """Start a server span as a child of the caller's span, or as the root of a new trace.

        If the caller's trace is not sampled, this span is not recorded.
        """
        if self._tracer is None:
            return NO_SPAN
        parent = PROPAGATOR.extract(_carrier(headers))
        return self._start(name, parent, SpanKind.SERVER, attributes)

    def start_child_of(
        self,
        name: str,
        headers: Headers | None,
        kind: SpanKind = SpanKind.SERVER,
        **attributes: Attribute,
    ) -> Span:
        """Start a child of the caller's span. Without one, nothing is recorded."""
        carrier = _carrier(headers or ()) if self._tracer is not None else {}
        if TRACEPARENT not in carrier:
            return NO_SPAN
        parent = PROPAGATOR.extract(carrier)
        if not trace.get_current_span(parent).get_span_context().is_valid:
            return NO_SPAN
        return self._start(name, parent, kind, attributes)

    def start_child(
        self, name: str, kind: SpanKind = SpanKind.INTERNAL, **attributes: Attribute
    ) -> Span:
        """Start a child of the current span. Without one, nothing is recorded."""
        parent = current_span()
        if not parent.is_recording:
            return NO_SPAN
        return self._start(name, parent.context(), kind, attributes)

    def start_step(self, name: str, **attributes: Attribute) -> Span:
        """Start a child of the current span, for a step between a question and its answer."""
        step: dict[str, Attribute] = {SPAN_KIND: KIND_CHAIN}
        return self.start_child(name, SpanKind.INTERNAL, **attributes, **step)

    def record(
        self, name: str, parent: Span, start_ns: int, end_ns: int, **attributes: Attribute
    ) -> None:
        """Record a child of a span after it has ended.

        Args:
            start_ns: When it began, in nanoseconds of Unix time.
            end_ns: When it ended.
        """
        if self._tracer is not None and parent.is_recording:
            span = self._tracer.start_span(
                name, parent.context(), SpanKind.INTERNAL, attributes, start_time=start_ns
            )
            span.end(end_ns)

    def close(self) -> None:
        """Export the remaining spans within EXPORT_TIMEOUT_S."""
        if self._provider is not None:
            self._provider.shutdown()

    def _start(
        self, name: str, parent: Context, kind: SpanKind, attributes: Mapping[str, Attribute]
    ) -> Span:
        if self._tracer is None:
            return NO_SPAN
        now_ns = time.time_ns()
        span = self._tracer.start_span(name, parent, kind, attributes, start_time=now_ns)
        if not span.is_recording():
            return NO_SPAN
        return Span(
            span,
            now_ns,
            exports_errors=self._exports_errors,
            exports_content=self._exports_content,
        )


def tracer(
    endpoint: str | None,
    service: str,
    instance: str,
    *,
    sample_ratio: float = 1.0,
    exports_errors: bool = False,
    exports_content: bool = False,
) -> Tracer:
    """Return the tracer of a service, which exports by OTLP over HTTP.

    Args:
        endpoint: Base URL, like http://collector:4318. None: no span is recorded.
        service: Name of the service.
        instance: Name of this process among those of the service.
        sample_ratio: Share of the traces without a parent that are recorded, 0 to 1. A span with a
            parent follows the parent's decision.
    """
    if not endpoint:
        return Tracer()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter,
    )
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio  # noqa: PLC0415

    provider = TracerProvider(
        sampler=ParentBasedTraceIdRatio(sample_ratio),
        resource=resource(service, instance),
        # The service calls close itself, within its own deadline.
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracer(
        provider,
        f"ragcache.{service}",
        exports_errors=exports_errors,
        exports_content=exports_content,
    )


def resource(service: str, instance: str) -> Resource:
    """Return the OpenTelemetry resource of a service."""
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415

    return Resource.create({"service.name": f"ragcache-{service}", "service.instance.id": instance})


def _carrier(headers: Headers) -> dict[str, str]:
    wanted = (TRACEPARENT, TRACESTATE)
    return {name: value for name, value in headers if name in wanted and isinstance(value, str)}
