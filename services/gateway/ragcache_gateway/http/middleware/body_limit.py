"""Limits the memory and time that request bodies take."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcache_core.errors import InvalidInput, TooLarge
from ragcache_gateway.admission.refusal import Refused
from ragcache_gateway.http.errors import response_to
from ragcache_gateway.http.middleware.request_pools import (
    STREAMED_PATHS,
    RequestPool,
    RequestPools,
)

DRAIN_MAX_BYTES = 128 << 20
"""Most of a refused body that the gateway reads and drops, so that the client gets the error."""


class BodyLimit:
    """Limits the memory and time that request bodies take while they arrive.

    Routes of STREAMED_PATHS limit theirs themselves.

    Args:
        pools: Bound the bytes of all bodies in memory at once.
        max_bytes: Largest body.
        timeout_s: Time for one body to arrive.
    """

    def __init__(self, app: ASGIApp, pools: RequestPools, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._pools = pools
        self.max_bytes = max_bytes
        self.timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http" or scope["path"] in STREAMED_PATHS:
            await self._app(scope, receive, send)
            return
        body = _BoundedBody(self, self._pools.of(scope["path"]), receive)
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
    """One request's body. Its bytes count in the request's pool."""

    def __init__(self, limit: BodyLimit, pool: RequestPool, receive: Receive) -> None:
        self._limit = limit
        self._pool = pool
        self._receive = receive
        self._deadline: float | None = None
        self._received_bytes = 0
        self._taken_bytes = 0
        self._has_more = True

    async def receive(self) -> Message:
        """Receive the next message. Raises TooLarge, Refused or InvalidInput."""
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
        try:
            self._pool.take_body_bytes(size)
        except Refused:
            await self.drain()
            raise
        self._taken_bytes += size
        return message

    async def drain(self) -> None:
        """Read the rest of the body, up to DRAIN_MAX_BYTES, and drop it."""
        with contextlib.suppress(TimeoutError):
            while self._has_more and self._received_bytes <= DRAIN_MAX_BYTES:
                await self._next()

    def release(self) -> None:
        """Return the body's bytes to the pool."""
        self._pool.return_body_bytes(self._taken_bytes)
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
