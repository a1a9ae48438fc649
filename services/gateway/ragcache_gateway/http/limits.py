"""ASGI middleware that keeps every request within its bounds and counts it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcache_core.errors import InvalidInput, RagCacheError, TooLarge
from ragcache_gateway.http.disconnect import ClientGone
from ragcache_gateway.http.errors import TooBusy, to_http
from ragcache_gateway.http.request_span import note_refusal
from ragcache_gateway.status.metrics import Metrics

log = logging.getLogger(__name__)

GONE_STATUS = 499
"""What is counted for a client that left before its answer began (nginx's number)."""

DRAIN_MAX_BYTES = 128 << 20
"""How much of a refused body is read and thrown away, so that its sender gets to read why."""

_QUIET = frozenset({"/healthz", "/readyz", "/metrics"})


def response_to(error: RagCacheError) -> JSONResponse:
    """An error as a response."""
    http = to_http(error)
    return JSONResponse(http.body, http.status, dict(http.headers))


class Observed:
    """Counts and logs every request; ends quietly those whose client has left."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        status = 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except ClientGone:
            self._metrics.disconnects.inc()
            if status == 500:
                status = GONE_STATUS
        except asyncio.CancelledError:
            # Only the server cancels, when the time for stopping is over. Its connection is closed
            # either way; raised further, every answer cut short would be a traceback in the log.
            log.warning("cut short by the stop: %s %s", scope["method"], repr(scope["path"]))
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            self._metrics.requests.labels(route, status).inc()
            level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
            elapsed_ms = 1e3 * (time.perf_counter() - start)
            # repr: a path may hold line breaks, and a log line must stay one line.
            path = repr(scope["path"])
            log.log(level, "%s %s %s %.0f ms", scope["method"], path, status, elapsed_ms)


class InFlightLimit:
    """Answers 429 when more than most requests under /v1 are in flight."""

    def __init__(self, app: ASGIApp, most: int, metrics: Metrics) -> None:
        self._app = app
        self._most = most
        self._metrics = metrics
        self._now = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        if self._now >= self._most:
            error = TooBusy(f"{self._most} requests are in flight already; try again")
            note_refusal(error)
            await response_to(error)(scope, receive, send)
            return
        self._now += 1
        self._metrics.in_flight.set(self._now)
        try:
            await self._app(scope, receive, send)
        finally:
            self._now -= 1
            self._metrics.in_flight.set(self._now)


class BodyLimit:
    """Bounds what bodies take in memory and time, while they arrive.

    max_bytes: of one body. total_bytes: of all bodies held at once. timeout_s: for one to arrive.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, total_bytes: int, timeout_s: float) -> None:
        self._app = app
        self.max_bytes = max_bytes
        self.timeout_s = timeout_s
        self.free_bytes = total_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
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
    """One request's body; takes what it holds from its limit's free bytes."""

    def __init__(self, limit: BodyLimit, receive: Receive) -> None:
        self._limit = limit
        self._receive = receive
        self._deadline: float | None = None
        self._seen = 0
        self._held = 0
        self._more = True

    async def receive(self) -> Message:
        """The next message. Raises TooLarge, TooBusy or InvalidInput."""
        if not self._more:
            return await self._receive()
        try:
            message = await self._next()
        except TimeoutError:
            self._more = False
            raise InvalidInput(
                "body", f"did not arrive within {self._limit.timeout_s:g} s", "send it faster"
            ) from None
        if self._seen > self._limit.max_bytes:
            await self.drain()
            raise self.too_large()
        size = len(message.get("body", b""))
        if size > self._limit.free_bytes:
            await self.drain()
            raise TooBusy("too many large requests are in flight already; try again")
        self._limit.free_bytes -= size
        self._held += size
        return message

    async def drain(self) -> None:
        """Read what is left, up to a bound, and throw it away."""
        with contextlib.suppress(TimeoutError):
            while self._more and self._seen <= DRAIN_MAX_BYTES:
                await self._next()

    def release(self) -> None:
        """Give back what was taken from the limit."""
        self._limit.free_bytes += self._held
        self._held = 0

    def too_large(self) -> TooLarge:
        """The error for a body over the bound."""
        return TooLarge(
            "body", f"is over {self._limit.max_bytes >> 20} MiB", "send less, or split the document"
        )

    async def _next(self) -> Message:
        now = asyncio.get_running_loop().time()
        if self._deadline is None:
            self._deadline = now + self._limit.timeout_s
        async with asyncio.timeout_at(self._deadline):
            message = await self._receive()
        self._more = message["type"] == "http.request" and message.get("more_body", False)
        self._seen += len(message.get("body", b""))
        return message


def _content_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


def _expects_continue(scope: Scope) -> bool:
    return any(name == b"expect" for name, _ in scope["headers"])
