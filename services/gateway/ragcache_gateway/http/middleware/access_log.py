"""Counts and logs requests."""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcache_gateway.http.disconnect import ClientDisconnected
from ragcache_gateway.status.metrics import Metrics

log = logging.getLogger(__name__)

CLIENT_CLOSED_STATUS = 499
"""Status counted for a client that disconnected before its answer began, as nginx does."""

_QUIET = frozenset({"/healthz", "/readyz", "/metrics"})


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
