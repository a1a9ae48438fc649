"""Limits the requests that are answered at once."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from ragcache_gateway.http.errors import TooBusy, response_to
from ragcache_gateway.http.middleware.request_pools import RequestPools
from ragcache_gateway.http.middleware.request_span import record_refusal


class RequestLimit:
    """Answers 429 to a request whose pool is full."""

    def __init__(self, app: ASGIApp, pools: RequestPools) -> None:
        self._app = app
        self._pools = pools

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        pool = self._pools.of(scope["path"])
        try:
            started = pool.enter()
        except TooBusy as error:
            record_refusal(error)
            await response_to(error)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            pool.leave(started)
