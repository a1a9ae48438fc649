"""Work for a client that may disconnect: cancel it, or stream to the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client disconnected before its answer was complete."""


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Wait for work; cancel it as soon as the client disconnects.

    Call it after the request's body has been read: from then on the only message to come is the
    disconnect. The caller owns what the work acquires, because a cancel may come after its last
    line.

    Raises:
        ClientDisconnected: The client disconnected first.
    """
    working = asyncio.create_task(work)
    waiting = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        raise ClientDisconnected
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events until they end or the client disconnects, then closes the stack.

    Args:
        stack: Owns what the events come from.
        send_timeout_s: Time for the client to take one event.
        watches: Whether to end when the client disconnects; else the events end by themselves.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        stack: AsyncExitStack,
        send_timeout_s: float,
        *,
        watches: bool = True,
    ) -> None:
        super().__init__()
        self._events = events
        self._stack = stack
        self._send_timeout_s = send_timeout_s
        self._watches = watches
        mark_as_event_stream(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. Raises ClientDisconnected."""
        async with self._stack:
            if self._watches:
                await cancel_on_disconnect(receive, self._stream(send))
            else:
                await self._stream(send)

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
            raise ClientDisconnected from None


def mark_as_event_stream(response: Response) -> None:
    """Set the headers of a stream of events."""
    del response.headers["content-length"]
    response.headers["cache-control"] = "no-cache"
    # Without it, nginx and similar proxies buffer events.
    response.headers["x-accel-buffering"] = "no"
