"""Spans of OpenTelemetry, by OTLP over HTTP: the one way in which parts make them.

``Tracer`` is what a part calls, and makes none; ``ExportingTracer`` is the same with a backend
behind it. OpenTelemetry is imported only for the second, so that a part without an endpoint pays
an empty call for each span and nothing else. How much is kept waiting for an export, and for how
long, its own variables say (``OTEL_BSP_*``), and so of traces that begin here how many are
sampled (``OTEL_TRACES_SAMPLER``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from enum import Enum
from typing import TYPE_CHECKING, Final, Self

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_wire.trace_context import TRACEPARENT, TRACESTATE, headers_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan

EXPORT_TIMEOUT_S: Final = 3.0
"""For one export, and for the last one when the part ends."""

Headers = Iterable[tuple[str, str | bytes]]
"""Of a call, as gRPC's metadata has them: names in lower case."""
Attribute = str | int | float | bool


class Kind(Enum):
    """On which side of a call a span is; named as OpenTelemetry's SpanKind."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CLIENT = "CLIENT"


class Span(AbstractContextManager["Span"]):
    """A span that goes nowhere. Ends with its block, or when told to; for any thread."""

    is_recording = False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end(error)

    def set(self, **attributes: Attribute) -> None:
        """Say more than was known at its begin; what is empty is left out."""

    def count(self, **numbers: int) -> None:
        """Add to attributes that are said at its end."""

    def event(self, name: str, **attributes: Attribute) -> None:
        """Something happened now."""

    def rename(self, name: str) -> None:
        """Call it what it could not be called at its begin."""

    def fail(self, reason: str = "") -> None:
        """What it is about has failed. The first reason stays."""

    def end(self, error: BaseException | None = None) -> None:
        """End it, if it has not ended. error: what ended its block, if anything did."""

    def current(self) -> AbstractContextManager[None]:
        """A block in which calls to other parts, and spans of ``within``, are below it."""
        return nullcontext()

    def headers(self) -> Mapping[str, str]:
        """W3C trace context for calls below it; none where nothing is recorded."""
        return {}


NO_SPAN: Final = Span()

_current: ContextVar[Span] = ContextVar("ragcache span", default=NO_SPAN)


def current_span() -> Span:
    """The innermost one whose ``current`` block this runs in."""
    return _current.get()


class Tracer:
    """Makes no spans. For any thread."""

    def request(self, name: str, headers: Headers, **attributes: Attribute) -> Span:
        """A server's span, below the caller's own; the begin of a trace if the caller has none.

        A caller's trace that is not sampled stays so.
        """
        return NO_SPAN

    def below(
        self, name: str, headers: Headers | None, kind: Kind = Kind.SERVER, **attributes: Attribute
    ) -> Span:
        """A span below the caller's own; none where that has none: who asks decides."""
        return NO_SPAN

    def within(self, name: str, kind: Kind = Kind.INTERNAL, **attributes: Attribute) -> Span:
        """A span below the current one; none where there is none."""
        return NO_SPAN

    def close(self) -> None:
        """Send what is left, within some seconds."""


class ExportingTracer(Tracer):
    """Spans for the provider's processors. Owns the provider.

    scope: who makes the spans. tells_errors: whether what errors say goes out with them; where it
    may quote a prompt or a document, only their kind does.
    """

    def __init__(self, provider: TracerProvider, scope: str, *, tells_errors: bool = False) -> None:
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
            TraceContextTextMapPropagator,
        )

        self._provider = provider
        self._tracer = provider.get_tracer(scope)
        self._propagator = TraceContextTextMapPropagator()
        self._tells_errors = tells_errors

    @classmethod
    def to(cls, endpoint: str, part: str, instance: str, *, tells_errors: bool = False) -> Self:
        """Spans exported by OTLP over HTTP.

        endpoint: base URL, like http://collector:4318. instance: the part's name among its peers.
        """
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

        # At the end of the process the part closes it in its own time, not the interpreter.
        provider = TracerProvider(resource=resource(part, instance), shutdown_on_exit=False)
        url = f"{endpoint.rstrip('/')}/v1/traces"
        exporter = OTLPSpanExporter(url, timeout=EXPORT_TIMEOUT_S)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider, f"ragcache.{part}", tells_errors=tells_errors)

    def request(self, name: str, headers: Headers, **attributes: Attribute) -> Span:
        """A server's span, below the caller's own or the begin of a trace."""
        parent = self._propagator.extract(_carrier(headers))
        return self._start(name, parent, Kind.SERVER, attributes)

    def below(
        self, name: str, headers: Headers | None, kind: Kind = Kind.SERVER, **attributes: Attribute
    ) -> Span:
        """A span below the caller's own; none where that has none."""
        carrier = _carrier(headers or ())
        if TRACEPARENT not in carrier:
            return NO_SPAN
        from opentelemetry.trace import get_current_span  # noqa: PLC0415

        parent = self._propagator.extract(carrier)
        if not get_current_span(parent).get_span_context().is_valid:
            return NO_SPAN
        return self._start(name, parent, kind, attributes)

    def within(self, name: str, kind: Kind = Kind.INTERNAL, **attributes: Attribute) -> Span:
        """A span below the current one; none where there is none."""
        above = current_span()
        if not isinstance(above, _RecordedSpan):
            return NO_SPAN
        return self._start(name, above.context(), kind, attributes)

    def close(self) -> None:
        """Send what is left, within some seconds."""
        self._provider.shutdown()

    def _start(
        self, name: str, parent: Context, kind: Kind, attributes: Mapping[str, Attribute]
    ) -> Span:
        from opentelemetry.trace import SpanKind  # noqa: PLC0415

        span = self._tracer.start_span(name, parent, SpanKind[kind.value], attributes)
        return _RecordedSpan(span, self._tells_errors) if span.is_recording() else NO_SPAN


class _RecordedSpan(Span):
    """A span of OpenTelemetry."""

    is_recording = True

    def __init__(self, span: OtelSpan, tells_errors: bool) -> None:
        self._span = span
        self._tells_errors = tells_errors
        self._counts: dict[str, int] = {}
        self._has_ended = False
        self._has_failed = False
        self._lock = threading.Lock()

    def set(self, **attributes: Attribute) -> None:
        """Say more than was known at its begin."""
        self._span.set_attributes({k: v for k, v in attributes.items() if v != ""})

    def count(self, **numbers: int) -> None:
        """Add to attributes that are said at its end."""
        for name, number in numbers.items():
            self._counts[name] = self._counts.get(name, 0) + number

    def event(self, name: str, **attributes: Attribute) -> None:
        """Something happened now."""
        self._span.add_event(name, attributes)

    def rename(self, name: str) -> None:
        """Call it what it could not be called at its begin."""
        self._span.update_name(name)

    def fail(self, reason: str = "") -> None:
        """What it is about has failed. The first reason stays."""
        from opentelemetry.trace import StatusCode  # noqa: PLC0415

        if self._has_failed:
            return
        self._has_failed = True
        self._span.set_status(StatusCode.ERROR, reason)

    def end(self, error: BaseException | None = None) -> None:
        """End it, if it has not ended."""
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
        if isinstance(error, Exception):
            self._fail_with(error)
        elif error is not None:  # its caller has gone, which is nobody's failure
            self._span.set_attribute("cancelled", True)
        self._span.set_attributes(self._counts)
        self._span.end()

    @contextmanager
    def current(self) -> Iterator[None]:
        """A block in which calls to other parts, and spans of ``within``, are below it."""
        from opentelemetry.trace import use_span  # noqa: PLC0415

        before = _current.set(self)
        try:
            with use_span(self._span, record_exception=False, set_status_on_exception=False):
                yield
        finally:
            _current.reset(before)

    def headers(self) -> Mapping[str, str]:
        """W3C trace context for calls below it."""
        return headers_of(self._span)

    def context(self) -> Context:
        """Of spans below it."""
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415

        return set_span_in_context(self._span)

    def _fail_with(self, error: Exception) -> None:
        kind = type(error).__name__
        self._span.set_attribute("error.type", kind)
        if self._tells_errors:
            self._span.record_exception(error)
            self.fail(f"{kind}: {error}")
        else:
            self.fail(f"{kind}: {error.part}" if isinstance(error, Unavailable) else kind)


def tracer(endpoint: str | None, part: str, instance: str) -> Tracer:
    """Of a part that may have nowhere to send spans to."""
    return ExportingTracer.to(endpoint, part, instance) if endpoint else Tracer()


def resource(part: str, instance: str) -> Resource:
    """What everything that a part sends is about."""
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415

    return Resource.create({"service.name": f"ragcache-{part}", "service.instance.id": instance})


def otlp_endpoint(environment: Mapping[str, str]) -> str | None:
    """Base URL of an OpenTelemetry collector, from RAGCACHE_OTLP_ENDPOINT; None: not set.

    Raises InvalidInput.
    """
    name = "RAGCACHE_OTLP_ENDPOINT"
    url = environment.get(name, "").strip()
    if url and not url.startswith(("http://", "https://")):
        raise InvalidInput(name, f"is {url!r}", "set it to a URL like http://collector:4318")
    return url or None


def _carrier(headers: Headers) -> dict[str, str]:
    wanted = (TRACEPARENT, TRACESTATE)
    return {name: value for name, value in headers if name in wanted and isinstance(value, str)}
