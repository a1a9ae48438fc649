"""Attributes of the span that belongs to the current request."""

from __future__ import annotations

from ragcache_core.errors import Unavailable
from ragcache_wire.tracing import current_span


def record_unavailable(error: Unavailable) -> None:
    """Mark the current span as failed because another part is unavailable.

    The span names the part only: the error's own text may quote a prompt.
    """
    current_span().fail(f"{error.component} unavailable")
