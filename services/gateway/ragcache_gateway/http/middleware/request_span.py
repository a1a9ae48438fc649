"""A trace span for every request, by OpenTelemetry's conventions for HTTP servers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_gateway.admission.refusal import Refused
from ragcache_gateway.http.disconnect import ClientDisconnected
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_gateway.telemetry.spans import record_unavailable
from ragcache_wire.tracing import Span, Tracer, current_span

_PREFIX: Final = "/v1/"
"""Requests for health and metrics are frequent and not traced."""
TRACE_KEY: Final = "ragcache.trace"
"""Where the ASGI scope has the W3C trace context of a recorded request."""


class RequestSpans:
    """Middleware that adds each request under /v1 to its caller's trace, or begins a trace.

    A span lasts as long as the answer. For a stream that is until the last byte, or until the
    client disconnects.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http" or not scope["path"].startswith(_PREFIX):
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        span = self._tracer.start_request(method, _headers(scope))
        if not span.is_recording:
            await self._app(scope, receive, send)
            return

        async def record_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                _set_status(span, message["status"])
            await send(message)

        scope[TRACE_KEY] = span.headers()
        span.set(**_attributes(scope))
        error: BaseException | None = None
        try:
            with span.current():
                await self._app(scope, receive, record_status)
        except ClientDisconnected:
            span.set(cancelled=True)
            raise
        except BaseException as raised:
            error = raised
            raise
        finally:
            route = getattr(scope.get("route"), "path", None)
            if route is not None:
                span.rename(f"{method} {route}")
                span.set(**{"http.route": route})
            span.end(error)


def record_refusal(error: RagCacheError, metrics: Metrics) -> None:
    """Record on the request's span why the gateway cannot serve it now, and count it.

    For other errors the status is enough, and their text may quote a prompt.
    """
    match error:
        case Unavailable():
            metrics.upstream_failures.labels(error.component).inc()
            record_unavailable(error)
        case Refused():
            metrics.refusals.labels(error.reason).inc()
            current_span().fail(str(error))


def _set_status(span: Span, status: int) -> None:
    span.set(**{"http.response.status_code": status})
    if status >= 500:
        span.set(**{"error.type": str(status)})
        span.fail()


def _attributes(scope: Scope) -> dict[str, str | int]:
    host, port = scope.get("server") or ("", None)
    return {
        "http.request.method": scope["method"],
        "url.scheme": scope.get("scheme", "http"),
        "url.path": scope["path"],
        "server.address": host,
        "server.port": port or "",
        "network.protocol.version": scope.get("http_version", ""),
    }


def _headers(scope: Scope) -> Iterable[tuple[str, str]]:
    for name, value in scope["headers"]:
        yield name.decode("latin-1"), value.decode("latin-1")
