"""The trace that a call to the store is part of, as W3C Trace Context writes it.

OpenTelemetry is looked at only where the process has imported it: who has not traces nothing, and
neither waits for the import nor needs the package.
"""

from __future__ import annotations

import sys
from typing import Any, Final

HEADER: Final = "traceparent"
"""Name of the gRPC metadata that carries it."""

Metadata = tuple[tuple[str, str], ...] | None
"""Of a gRPC call."""


def traceparent() -> str:
    """The caller's current span; "" where there is none, or none that is sampled."""
    api: Any = sys.modules.get("opentelemetry.trace")
    # Another thread may be about to import it.
    current = getattr(api, "get_current_span", None)
    if current is None:
        return ""
    span = current().get_span_context()
    if not (span.is_valid and span.trace_flags.sampled):
        return ""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"


def metadata(parent: str) -> Metadata:
    """A gRPC call's, for what ``traceparent`` gave."""
    return ((HEADER, parent),) if parent else None
