"""An OpenTelemetry collector for tests: it keeps the OTLP requests that it receives over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
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
