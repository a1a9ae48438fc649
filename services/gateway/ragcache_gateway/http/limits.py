"""ASGI middleware that limits, counts and logs requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcache_core.errors import InvalidInput, RagCacheError, TooLarge
from ragcache_gateway.http.disconnect import ClientDisconnected
from ragcache_gateway.http.errors import TooBusy, to_http
from ragcache_gateway.http.request_span import record_refusal
from ragcache_gateway.status.metrics import Metrics

log = logging.getLogger(__name__)

CLIENT_CLOSED_STATUS = 499
"""Status counted for a client that disconnected before its answer began, as nginx does."""

DRAIN_MAX_BYTES = 128 << 20
"""Most of a refused body that the gateway reads and drops, so that the client gets the error."""

_QUIET = frozenset({"/healthz", "/readyz", "/metrics"})


def response_to(error: RagCacheError) -> JSONResponse:
    """Convert an error to a response."""
    http = to_http(error)
    return JSONResponse(http.body, http.status, dict(http.headers))


class AccessLog:
    """Counts and logs every request, and ends those whose client has disconnected."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        status = 500

        async def record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, record_status)
        except ClientDisconnected:
            self._metrics.disconnects.inc()
            if status == 500:
                status = CLIENT_CLOSED_STATUS
        except asyncio.CancelledError:
            # The server cancels requests when its grace period is over, and closes the connection.
            # Raising the error further would only log a traceback for each request.
            log.warning(
                "access log: request cancelled by shutdown method=%s path=%r",
                scope["method"],
                scope["path"],
            )
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            self._metrics.requests.labels(route, status).inc()
            level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
            elapsed_ms = 1e3 * (time.perf_counter() - start)
            # repr: a path may contain line breaks, and a log line must stay one line.
            path = repr(scope["path"])
            log.log(level, "%s %s %s %.0f ms", scope["method"], path, status, elapsed_ms)


class InFlightLimit:
    """Answers 429 to requests under /v1 above a maximum in flight."""

    def __init__(self, app: ASGIApp, max_in_flight: int, metrics: Metrics) -> None:
        self._app = app
        self._max_in_flight = max_in_flight
        self._metrics = metrics
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        if self._in_flight >= self._max_in_flight:
            error = TooBusy(f"{self._max_in_flight} requests are in flight already; try again")
            record_refusal(error)
            await response_to(error)(scope, receive, send)
            return
        self._in_flight += 1
        self._metrics.in_flight.set(self._in_flight)
        try:
            await self._app(scope, receive, send)
        finally:
            self._in_flight -= 1
            self._metrics.in_flight.set(self._in_flight)


class BodyLimit:
    """Limits the memory and time that request bodies take while they arrive.

    Args:
        max_bytes: Largest body.
        total_bytes: Most bytes of all bodies in memory at once.
        timeout_s: Time for one body to arrive.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, total_bytes: int, timeout_s: float) -> None:
        self._app = app
        self.max_bytes = max_bytes
        self.timeout_s = timeout_s
        self.free_bytes = total_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _BoundedBody(self, receive)
        try:
            announced = _content_length(scope)
            if announced > self.max_bytes:
                if announced <= DRAIN_MAX_BYTES and not _expects_continue(scope):
                    await body.drain()
                await response_to(body.too_large())(scope, receive, send)
                return
            await self._app(scope, body.receive, send)
        finally:
            body.release()


class _BoundedBody:
    """One request's body. Its bytes count against the free bytes of the limit."""

    def __init__(self, limit: BodyLimit, receive: Receive) -> None:
        self._limit = limit
        self._receive = receive
        self._deadline: float | None = None
        self._received_bytes = 0
        self._taken_bytes = 0
        self._has_more = True

    async def receive(self) -> Message:
        """Receive the next message. Raises TooLarge, TooBusy or InvalidInput."""
        if not self._has_more:
            return await self._receive()
        try:
            message = await self._next()
        except TimeoutError:
            self._has_more = False
            raise InvalidInput(
                "body", f"did not arrive within {self._limit.timeout_s:g} s", "send it faster"
            ) from None
        if self._received_bytes > self._limit.max_bytes:
            await self.drain()
            raise self.too_large()
        size = len(message.get("body", b""))
        if size > self._limit.free_bytes:
            await self.drain()
            raise TooBusy("too many large requests are in flight already; try again")
        self._limit.free_bytes -= size
        self._taken_bytes += size
        return message

    async def drain(self) -> None:
        """Read the rest of the body, up to DRAIN_MAX_BYTES, and drop it."""
        with contextlib.suppress(TimeoutError):
            while self._has_more and self._received_bytes <= DRAIN_MAX_BYTES:
                await self._next()

    def release(self) -> None:
        """Return the body's bytes to the limit."""
        self._limit.free_bytes += self._taken_bytes
        self._taken_bytes = 0

    def too_large(self) -> TooLarge:
        """Make the error for a body over the limit."""
        return TooLarge(
            "body", f"is over {self._limit.max_bytes >> 20} MiB", "send less, or split the document"
        )

    async def _next(self) -> Message:
        now = asyncio.get_running_loop().time()
        if self._deadline is None:
            self._deadline = now + self._limit.timeout_s
        async with asyncio.timeout_at(self._deadline):
            message = await self._receive()
        self._has_more = message["type"] == "http.request" and message.get("more_body", False)
        self._received_bytes += len(message.get("body", b""))
        return message


def _content_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


def _expects_continue(scope: Scope) -> bool:
    return any(name == b"expect" for name, _ in scope["headers"])
