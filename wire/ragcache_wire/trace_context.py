"""The trace that a call is part of, as W3C Trace Context writes it.

OpenTelemetry is looked at only where the process has imported it: who has not traces nothing, and
neither waits for the import nor needs the package.
"""

from __future__ import annotations

import sys
from typing import Any, Final

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

Metadata = tuple[tuple[str, str], ...] | None
"""Of a gRPC call."""


def traceparent() -> str:
    """The caller's current span; "" where there is none, or none that is sampled."""
    return headers_of(_current()).get(TRACEPARENT, "")


def metadata(parent: str) -> Metadata:
    """A gRPC call's, for what ``traceparent`` gave."""
    return ((TRACEPARENT, parent),) if parent else None


def current_metadata() -> Metadata:
    """A gRPC call's, with all that the caller's current span says; None as in ``traceparent``."""
    return tuple(headers_of(_current()).items()) or None


def headers_of(span: Any) -> dict[str, str]:
    """What an OpenTelemetry span's calls carry, by header; none if it is None or not sampled."""
    context = span.get_span_context() if span is not None else None
    if context is None or not (context.is_valid and context.trace_flags.sampled):
        return {}
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    state = context.trace_state.to_header() if context.trace_state else ""
    return {TRACEPARENT: parent, **({TRACESTATE: state} if state else {})}


def _current() -> Any:
    api: Any = sys.modules.get("opentelemetry.trace")
    # Another thread may be about to import it.
    current = getattr(api, "get_current_span", None)
    return current() if current is not None else None
