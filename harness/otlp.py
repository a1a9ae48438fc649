"""An OpenTelemetry collector for tests: it keeps the OTLP requests that it receives over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Collector:
    """The received requests. bodies: request bodies by path."""

    url: str
    bodies: dict[str, list[bytes]]

    def metrics(self) -> list[ExportMetricsServiceRequest]:
        """Return every export of metrics, in order."""
        return [
            ExportMetricsServiceRequest.FromString(body)
            for body in self.bodies.get("/v1/metrics", ())
        ]

    def spans(self) -> list[Any]:
        """Return every span."""
        return [
            span
            for body in self.bodies.get("/v1/traces", ())
            for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]

    def spans_of(self, service: str) -> list[Any]:
        """Return every span of one service, by the service name of its resource."""
        return [
            span
            for body in self.bodies.get("/v1/traces", ())
            for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans
            if ("service.name", f"ragcache-{service}") in _attributes(of_resource.resource)
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]

    def figures(self) -> dict[tuple[str, frozenset[tuple[str, str | int]]], float]:
        """Return the last value of every sum and gauge, by name and attributes."""
        return {
            (metric.name, frozenset(_attributes(point))): point.as_double or point.as_int
            for export in self.metrics()
            for of_resource in export.resource_metrics
            for of_scope in of_resource.scope_metrics
            for metric in of_scope.metrics
            for point in (*metric.sum.data_points, *metric.gauge.data_points)
        }


def attributes_of(point: Any) -> dict[str, Any]:
    """Return the attributes of a point, a span or a resource."""
    return {
        attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value"))
        for attribute in point.attributes
    }


def _attributes(point: Any) -> Iterator[tuple[str, str | int]]:
    yield from attributes_of(point).items()


@contextmanager
def collector() -> Iterator[Collector]:
    """Yield a collector that listens on its own port."""
    bodies: dict[str, list[bytes]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["content-type"] == "application/x-protobuf"
            body = self.rfile.read(int(self.headers["content-length"]))
            bodies.setdefault(self.path, []).append(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield Collector(f"http://127.0.0.1:{server.server_address[1]}", bodies)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


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
