"""W3C trace context of the current span, for calls to other services.

It uses OpenTelemetry only if the process has already imported it. A process that has not imported
it traces nothing, and does not need the package.
"""

from __future__ import annotations

import sys
from typing import Any, Final

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

Metadata = tuple[tuple[str, str], ...] | None
"""Metadata of a gRPC call."""


def traceparent() -> str:
    """Return the current span as a traceparent; "" if there is none or it is not sampled."""
    return headers_of(_current()).get(TRACEPARENT, "")


def metadata(parent: str) -> Metadata:
    """Return gRPC metadata with a traceparent; None for ""."""
    return ((TRACEPARENT, parent),) if parent else None


def current_metadata() -> Metadata:
    """Return gRPC metadata with the current span's traceparent and tracestate."""
    return tuple(headers_of(_current()).items()) or None


def headers_of(span: Any) -> dict[str, str]:
    """Return the trace context headers of an OpenTelemetry span.

    They are empty if the span is None or not sampled.
    """
    context = span.get_span_context() if span is not None else None
    if context is None or not (context.is_valid and context.trace_flags.sampled):
        return {}
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    state = context.trace_state.to_header() if context.trace_state else ""
    return {TRACEPARENT: parent, **({TRACESTATE: state} if state else {})}


def _current() -> Any:
    api: Any = sys.modules.get("opentelemetry.trace")
    # While another thread imports the module, it lacks the function.
    current = getattr(api, "get_current_span", None)
    return current() if current is not None else None
