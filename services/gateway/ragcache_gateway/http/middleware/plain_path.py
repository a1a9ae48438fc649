"""Answers clients whose base URL ends with a slash."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from ragcache_core.access.endpoints import plain_path


class PlainPath:
    """Removes doubled slashes from the path before anything else reads it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "http" and "//" in scope["path"]:
            scope["path"] = plain_path(scope["path"])
        await self._app(scope, receive, send)
