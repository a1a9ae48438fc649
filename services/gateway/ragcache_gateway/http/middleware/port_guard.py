"""Serves questions on one port, and every path on another, which few clients reach."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from ragcache_core.access.endpoints import is_on_ask_port
from ragcache_core.errors import NotFound
from ragcache_gateway.http.errors import response_to


class PortGuard:
    """Answers 404 to a path that the port of the connection does not serve.

    The port is that of the socket, which no header of a request can change.

    Args:
        admin_port: The port that serves every path.
    """

    def __init__(self, app: ASGIApp, admin_port: int) -> None:
        self._app = app
        self._admin_port = admin_port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "http" and not is_on_ask_port(scope["path"]):
            _, port = scope.get("server") or ("", None)
            if port != self._admin_port:
                fix = "send it to the admin port (spec.gateway.adminPort)"
                error = NotFound("path on this port", scope["path"], fix)
                await response_to(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
