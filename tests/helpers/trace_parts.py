"""What the spans of a request say about its time to the first token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TracedRequest:
    """The span of a request, and the spans directly below it by their start."""

    span: Any
    parts: Sequence[Any]

    @property
    def answered_ns(self) -> int:
        """Time of the first token; of an answer in one piece, the time of the answer."""
        engine = self.named("engine")[-1]
        times = [event.time_unix_nano for event in engine.events if event.name == "first token"]
        return int(times[0] if times else engine.end_time_unix_nano)

    def named(self, name: str) -> list[Any]:
        """Return the parts with a name."""
        return [part for part in self.parts if part.name == name]

    def waited_s(self) -> float:
        """Return the time from the request to ``answered_ns``."""
        return float(self.answered_ns - self.span.start_time_unix_nano) / 1e9

    def parts_s(self, until_ns: int, *, without: str = "") -> float:
        """Return the sum of the parts until a time. Overlaps count once.

        Args:
            until_ns: In nanoseconds of Unix time.
            without: Name of parts to leave out.
        """
        return covered_ns([p for p in self.parts if p.name != without], until_ns) / 1e9


def traced_request(spans: Iterable[Any], trace_id: str, route: str) -> TracedRequest:
    """Return the one request to a route in a trace."""
    found = [span for span in spans if span.trace_id.hex() == trace_id]
    [request] = [span for span in found if span.name == f"POST {route}"]
    parts = [span for span in found if span.parent_span_id == request.span_id]
    return TracedRequest(request, sorted(parts, key=lambda span: span.start_time_unix_nano))


def covered_ns(spans: Iterable[Any], end_ns: int) -> int:
    """Return how much of the time until end_ns at least one span covers."""
    covered, reached = 0, 0
    for span in sorted(spans, key=lambda one: one.start_time_unix_nano):
        start = max(reached, span.start_time_unix_nano)
        reached = max(reached, min(span.end_time_unix_nano, end_ns))
        covered += max(0, reached - start)
    return covered


def orphans(spans: Sequence[Any], callers: Iterable[str]) -> list[str]:
    """Return the names of spans whose parent is neither among them nor a caller.

    Args:
        callers: Span ids in hexadecimal digits.
    """
    known = {(span.trace_id, span.span_id) for span in spans}
    outside = set(callers)
    return [
        span.name
        for span in spans
        if span.parent_span_id
        and span.parent_span_id.hex() not in outside
        and (span.trace_id, span.parent_span_id) not in known
    ]
