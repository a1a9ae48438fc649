"""W3C trace context of the current span, for calls to other services."""

from __future__ import annotations

from typing import Final

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

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
