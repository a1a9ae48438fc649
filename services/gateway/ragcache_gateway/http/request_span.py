"""A span for every request, by OpenTelemetry's conventions for HTTP servers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_gateway.http.disconnect import ClientGone
from ragcache_gateway.http.errors import TooBusy
from ragcache_wire.tracing import Span, Tracer, current_span

_PREFIX: Final = "/v1/"
"""Health and metrics are asked for all the time, and nobody looks into that."""


class Traced:
    """Has every request under /v1 be part of its caller's trace, or begin one.

    A span lasts as long as its answer: of a stream, until its last byte or until its client left.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http" or not scope["path"].startswith(_PREFIX):
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        span = self._tracer.start_request(method, _headers(scope))
        if not span.is_recording:
            await self._app(scope, receive, send)
            return

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                _note_status(span, message["status"])
            await send(message)

        span.set(**_attributes(scope))
        error: BaseException | None = None
        try:
            with span.current():
                await self._app(scope, receive, noting)
        except ClientGone:
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


def note_refusal(error: RagCacheError) -> None:
    """Say on the request's span why it is not served now; of other errors its status says enough.

    What they say may quote a prompt.
    """
    match error:
        case Unavailable():
            current_span().fail(f"{error.part} unavailable")
        case TooBusy():
            current_span().fail(str(error))


def _note_status(span: Span, status: int) -> None:
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
