"""Work for a client that may leave: racing it, streaming to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ClientGone(Exception):
    """The client left before its answer was whole; nobody is there to tell."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Result of work, which is cancelled as soon as the client leaves; then raises ClientGone.

    Only after the request's body has been read: from then on the one message to come is that the
    client has left. What work acquires must belong to somebody outside, since it may be cancelled
    after its last line.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        raise ClientGone
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends framed events until they end or the client leaves, then closes the stack.

    send_timeout_s: for the client to take one event. The stack owns what the events come from.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], stack: AsyncExitStack, send_timeout_s: float
    ) -> None:
        super().__init__()
        self._events = events
        self._stack = stack
        self._send_timeout_s = send_timeout_s
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        # Else proxies of the nginx family hold events back until their buffer is full.
        self.headers["x-accel-buffering"] = "no"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See starlette.responses.Response. Raises ClientGone."""
        async with self._stack:
            await unless_gone(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async with aclosing(self._events) as events:
            async for event in events:
                await self._send(send, event, more=True)
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            raise ClientGone from None
