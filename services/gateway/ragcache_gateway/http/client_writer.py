"""Writes a streamed body to a client, without a task switch for each event.

ASGI's ``send`` passes through every middleware and costs ten times as much as the write itself. So
``http/server.py`` shows the client's connection to the application in an extension of the scope. A
server without that extension gets the same bytes through ``send``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl

from ragcache_gateway.http.disconnect import (
    ClientDisconnected,
    cancel_on_disconnect,
    mark_as_event_stream,
)

CLIENT_CONNECTION: Final = "ragcache.client_connection"
"""Name of the ASGI extension with the client's connection."""


@dataclass(frozen=True, slots=True)
class ClientConnection:
    """A client's connection, and whether its buffer is full."""

    transport: asyncio.Transport
    flow: FlowControl


class ClientWriter(Protocol):
    """Takes parts of a body whose head has been sent."""

    def write(self, part: bytes) -> None:
        """Add a part."""

    @property
    def is_full(self) -> bool:
        """Whether to call ``drain`` before the next part."""

    async def drain(self) -> None:
        """Wait until the client has taken parts. Raises ClientDisconnected if it takes too long."""


def client_writer(scope: Scope, send: Send, timeout_s: float) -> ClientWriter:
    """Return the writer for a request.

    Args:
        timeout_s: Time for the client to take what was written.
    """
    extension = scope.get("extensions", {}).get(CLIENT_CONNECTION)
    if extension is None:
        return AsgiWriter(send, timeout_s)
    return DirectWriter(extension["connection"], timeout_s)


class DirectWriter:
    """Writes chunks of HTTP/1.1 to the connection. uvicorn sends head and end."""

    def __init__(self, connection: ClientConnection, timeout_s: float) -> None:
        self._transport, self._flow = connection.transport, connection.flow
        self._timeout_s = timeout_s

    def write(self, part: bytes) -> None:
        """Write a part as one chunk."""
        if part and not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))

    @property
    def is_full(self) -> bool:
        """Whether the connection's buffer is above its limit."""
        return self._flow.write_paused

    async def drain(self) -> None:
        """Wait until the buffer is below its limit."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._flow.drain()
        except TimeoutError:
            raise ClientDisconnected from None


class AsgiWriter:
    """Collects parts and sends them with ASGI's ``send``."""

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._parts: list[bytes] = []

    def write(self, part: bytes) -> None:
        """Collect a part."""
        self._parts.append(part)

    @property
    def is_full(self) -> bool:
        """Whether there is something to send."""
        return bool(self._parts)

    async def drain(self) -> None:
        """Send what was collected."""
        body = b"".join(self._parts)
        self._parts.clear()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
        except TimeoutError:
            raise ClientDisconnected from None


class TokenStream(Response):
    """Has events written until they end or the client disconnects, then closes the stack.

    Args:
        write_events: Writes all events.
        stack: Owns what the events come from.
        send_timeout_s: Time for the client to take what was written.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        write_events: Callable[[ClientWriter], Awaitable[None]],
        stack: AsyncExitStack,
        send_timeout_s: float,
    ) -> None:
        super().__init__()
        self._write_events = write_events
        self._stack = stack
        self._send_timeout_s = send_timeout_s
        mark_as_event_stream(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. Raises ClientDisconnected."""
        async with self._stack:
            await cancel_on_disconnect(receive, self._stream(scope, send))

    async def _stream(self, scope: Scope, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        writer = client_writer(scope, send, self._send_timeout_s)
        try:
            await self._write_events(writer)
        except asyncio.CancelledError:
            # Its error event is part of the stream.
            await _end(writer, send)
            raise
        await _end(writer, send)


async def _end(writer: ClientWriter, send: Send) -> None:
    if writer.is_full:
        await writer.drain()
    await send({"type": "http.response.body", "body": b"", "more_body": False})
