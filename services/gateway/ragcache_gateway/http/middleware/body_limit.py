"""Limits the memory and time that request bodies take."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcache_core.access.caller import Caller
from ragcache_core.errors import RagCacheError, TooLarge
from ragcache_gateway.http.disconnect import ClientDisconnected
from ragcache_gateway.http.errors import TooSlow, response_to
from ragcache_gateway.http.middleware.key_check import CALLER
from ragcache_gateway.http.middleware.request_pools import (
    QUESTION_PATHS,
    STREAMED_PATHS,
    RequestPool,
    RequestPools,
)

DRAIN_MAX_BYTES: Final = 128 << 20
"""Most of a refused body that the gateway reads and drops, so that the client gets the error."""

_FIRST_S: Final = 10.0
"""Time for the first bytes of a body. Each byte adds to it."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What a body may have.

    Attributes:
        max_bytes: Size of the largest body.
        question_max_bytes: Size of the largest one of a question.
        timeout_s: Time for the largest body to arrive. A smaller one has less: 10 s, and the rest
            by its size.
    """

    max_bytes: int
    question_max_bytes: int
    timeout_s: float

    def size_of(self, path: str) -> int:
        """Return the size of the largest body for a path."""
        return self.question_max_bytes if path in QUESTION_PATHS else self.max_bytes

    def time_for(self, received_bytes: int) -> float:
        """Return the seconds in which a body of at least this size has to arrive."""
        first_s = min(_FIRST_S, self.timeout_s)
        share = min(1.0, received_bytes / max(1, self.max_bytes))
        return first_s + share * (self.timeout_s - first_s)


class BodyLimit:
    """Receives each body as a whole, before the request takes a slot of its pool.

    So a slow body delays its sender alone. Routes of STREAMED_PATHS limit theirs themselves.

    Args:
        pools: Bound the bytes of all bodies in memory at once.
    """

    def __init__(self, app: ASGIApp, pools: RequestPools, limits: BodyLimits) -> None:
        self._app = app
        self._pools = pools
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection. Raises ClientDisconnected."""
        if scope["type"] != "http" or scope["path"] in STREAMED_PATHS:
            await self._app(scope, receive, send)
            return
        body = _BoundedBody(
            self._limits, self._pools.of(scope["path"]), scope["state"][CALLER], scope, receive
        )
        try:
            announced = _content_length(scope)
            if announced > body.max_bytes:
                if announced <= DRAIN_MAX_BYTES and not _expects_continue(scope):
                    await body.drain()
                await response_to(body.too_large())(scope, receive, send)
                return
            await body.read()
            await self._app(scope, body.receive, send)
        finally:
            body.release()


class _BoundedBody:
    """One request's body. Its bytes count in the request's pool."""

    def __init__(
        self, limits: BodyLimits, pool: RequestPool, caller: Caller, scope: Scope, receive: Receive
    ) -> None:
        self._limits = limits
        self.max_bytes = limits.size_of(scope["path"])
        self._pool = pool
        self._caller = caller
        self._receive = receive
        self._started_s: float | None = None
        self._received_bytes = 0
        self._taken_bytes = 0
        self._has_more = True
        self._body = bytearray()
        self._error: RagCacheError | None = None
        self._is_given = False

    async def read(self) -> None:
        """Read all of the body, or keep the error that ``receive`` raises."""
        try:
            while self._has_more:
                await self._read_part()
        except RagCacheError as error:
            self._body.clear()
            self._error = error
            if not isinstance(error, TooSlow):
                await self.drain()

    async def receive(self) -> Message:
        """Return the body once, then what comes after it.

        Raises:
            RagCacheError: The body could not be read. The error says why.
        """
        if self._error is not None:
            raise self._error
        if self._is_given:
            return await self._receive()
        self._is_given = True
        whole = bytes(self._body)
        self._body.clear()
        return {"type": "http.request", "body": whole, "more_body": False}

    async def drain(self) -> None:
        """Read the rest of the body, up to DRAIN_MAX_BYTES, and drop it."""
        with contextlib.suppress(TimeoutError):
            while self._has_more and self._received_bytes <= DRAIN_MAX_BYTES:
                await self._next()

    def release(self) -> None:
        """Return the body's bytes to the pool."""
        self._pool.return_body_bytes(self._caller, self._taken_bytes)
        self._taken_bytes = 0

    def too_large(self) -> TooLarge:
        """Make the error for a body over the limit."""
        is_question = self.max_bytes < self._limits.max_bytes
        fix = "send no more than the model holds" if is_question else "split the document"
        return TooLarge("body", f"is over {_shown(self.max_bytes)}", f"send less, or {fix}")

    async def _read_part(self) -> None:
        try:
            part = await self._next()
        except TimeoutError:
            raise TooSlow(self._limits.time_for(self._received_bytes)) from None
        if self._received_bytes > self.max_bytes:
            raise self.too_large()
        if part:
            self._pool.take_body_bytes(self._caller, len(part))
            self._taken_bytes += len(part)
            self._body += part

    async def _next(self) -> bytes:
        """Receive the next part. Raises TimeoutError or ClientDisconnected."""
        now = asyncio.get_running_loop().time()
        if self._started_s is None:
            self._started_s = now
        deadline_s = self._started_s + self._limits.time_for(self._received_bytes)
        async with asyncio.timeout_at(deadline_s):
            message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        self._has_more = message.get("more_body", False)
        part: bytes = message.get("body", b"")
        self._received_bytes += len(part)
        return part


def _shown(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes % (1 << 20) == 0 else f"{num_bytes >> 10} KiB"


def _content_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


def _expects_continue(scope: Scope) -> bool:
    return any(name == b"expect" for name, _ in scope["headers"])
