"""Work for a client that may disconnect: cancel it, or stream to the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ragcache_core.errors import InvalidInput

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


async def receive_piece(receive: Receive, timeout_s: float | None) -> tuple[bytes, bool]:
    """Receive the next piece of a body. Return it, and whether there are more.

    Args:
        timeout_s: Time for it to arrive. None: no limit.

    Raises:
        InvalidInput: It did not arrive in time.
        ClientDisconnected: The client disconnected.
    """
    try:
        async with asyncio.timeout(timeout_s):
            message = await receive()
    except TimeoutError:
        raise InvalidInput("body", f"had a pause of {timeout_s:g} s", "send it faster") from None
    if message["type"] == "http.disconnect":
        raise ClientDisconnected
    return message.get("body", b""), message.get("more_body", False)


class EventStream(Response):
    """Sends events until they end. They also end when the client disconnects.

    Args:
        send_timeout_s: Time for the client to take one event.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], send_timeout_s: float) -> None:
        super().__init__()
        self._events = events
        self._send_timeout_s = send_timeout_s
        mark_as_event_stream(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. Raises ClientDisconnected."""
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
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
