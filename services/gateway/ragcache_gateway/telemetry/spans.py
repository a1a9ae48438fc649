"""Attributes of the span that belongs to the current request, and its part before the answer."""

from __future__ import annotations

import time

from ragcache_core.errors import Unavailable
from ragcache_wire.telemetry import semantic_conventions as names
from ragcache_wire.tracing import Attribute, Tracer, current_span


def record_unavailable(error: Unavailable) -> None:
    """Mark the current span as failed because another part is unavailable.

    The span names the part only: the error's own text may quote a prompt.
    """
    current_span().fail(f"{error.component} unavailable")


def record_reading(tracer: Tracer, question: str = "") -> None:
    """Record the time from the arrival of the current request until now as its span ``read``.

    Args:
        question: Its text, which is exported only if the tracer exports content.
    """
    span = current_span()
    if span.is_recording:
        step: dict[str, Attribute] = {names.SPAN_KIND: names.KIND_CHAIN}
        tracer.record("read", span, span.started_ns, time.time_ns(), **step)
        span.set(**step)
        span.set_content(**{names.INPUT_VALUE: question})
