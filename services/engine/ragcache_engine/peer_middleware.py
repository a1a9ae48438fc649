"""Admits only peers to vLLM's HTTP port. vLLM makes a ``PeerMiddleware`` for its ``--middleware``.

vLLM's own ``--api-key`` covers the paths below ``/v1`` alone, and the key never changes. Requests
carry the same tokens as gRPC calls, for the path that they ask for.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from ragcache_core.errors import Unauthenticated
from ragcache_wire.peers.peer_access import PeerGuard
from ragcache_wire.settings import EngineSettings
from ragcache_wire.watched.members import FixedMembers

OPEN_PATHS: Final = frozenset({"/health", "/metrics", "/ragcache/processor"})
"""Paths without a token: for the kubelet, for Prometheus and for the operator, which have no key.
They tell of the server's load and of its processor, and nothing of a request."""

_POLICY_VIOLATION: Final = 1008

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class PeerMiddleware:
    """ASGI middleware that refuses requests without a token, except for OPEN_PATHS.

    Args:
        app: vLLM's application.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        # The middleware uses no store, and a server without the connector has none.
        settings = EngineSettings(cachestore=FixedMembers(()))
        self._keys, self._certificates = settings.signing_key_file, settings.tls_dir
        self._served = self._certificates and self._certificates.current()
        self._guards: dict[str, PeerGuard] = {}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one request of the server."""
        if scope["type"] != "lifespan":
            self._renew_certificate(scope)
        if scope["type"] != "lifespan" and scope["path"] not in OPEN_PATHS:
            try:
                self._guard(scope).check(scope["path"], _metadata(scope))
            except Unauthenticated as error:
                await _refuse(scope, send, error)
                return
        await self._app(scope, receive, send)

    def _renew_certificate(self, scope: Message) -> None:
        """Give vLLM's server a new certificate, if there is one.

        vLLM's own watch (``--enable-ssl-refresh``) loses a mounted folder at its first change.
        """
        if self._certificates is None:
            return
        current = self._certificates.current()
        if current is not self._served:
            self._certificates.load_into(scope["app"].state.server.config.ssl)
            self._served = current

    def _guard(self, scope: Message) -> PeerGuard:
        """Return the guard of the address at which the request has arrived."""
        host = str((scope.get("server") or ("",))[0])
        guard = self._guards.get(host)
        if guard is None:  # this machine has few addresses
            guard = self._guards[host] = PeerGuard(self._keys, f"{host}:0")
        return guard


def _metadata(scope: Message) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]


async def _refuse(scope: Message, send: Send, error: Unauthenticated) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        return
    body = {"error": {"message": str(error), "type": "unauthenticated", "code": 401}}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
