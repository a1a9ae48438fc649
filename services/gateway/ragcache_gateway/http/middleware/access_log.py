"""Counts and logs requests."""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcache_gateway.http.disconnect import ClientDisconnected
from ragcache_gateway.http.errors import response_to, stopping
from ragcache_gateway.http.middleware.key_check import CALLER
from ragcache_gateway.http.middleware.request_span import TRACE_KEY
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_gateway.telemetry.tenant_metrics import CLIENT_CLOSED_STATUS
from ragcache_wire.telemetry.log_format import log_fields
from ragcache_wire.telemetry.metric_registry import exemplar

log = logging.getLogger(__name__)

_API_PREFIX = "/v1/"
_QUIET = frozenset({"/health", "/healthz", "/readyz", "/metrics"})


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
        has_begun = False

        async def record_status(message: Message) -> None:
            nonlocal status, has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, record_status)
        except ClientDisconnected:
            self._metrics.disconnects.inc()
            if status == 500:
                status = CLIENT_CLOSED_STATUS
        except asyncio.CancelledError:
            # The server cancels requests at the end of its grace period.
            # Raising the error further would only log a traceback for each request.
            log.warning(
                "access log: request cancelled by shutdown method=%s path=%r",
                scope["method"],
                scope["path"],
            )
            if not has_begun:
                await response_to(stopping())(scope, receive, record_status)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            self._metrics.requests.labels(route, status).inc()
            caller = scope.get("state", {}).get(CALLER)
            if caller is not None and scope["path"].startswith(_API_PREFIX):
                self._metrics.tenants.observe_request(caller.tenant_label, status)
            level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
            elapsed_ms = 1e3 * (time.perf_counter() - start)
            # repr: a path may contain line breaks, and a log line must stay one line.
            path = repr(scope["path"])
            log.log(
                level,
                "%s %s %s %.0f ms",
                scope["method"],
                path,
                status,
                elapsed_ms,
                extra=log_fields(
                    method=scope["method"],
                    route=route,
                    status=status,
                    duration_ms=round(elapsed_ms, 3),
                    **(exemplar(scope.get(TRACE_KEY, {})) or {}),
                ),
            )
