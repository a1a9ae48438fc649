"""A response whose events are written as they arrive."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ragcache_gateway.http.disconnect import cancel_on_disconnect, mark_as_event_stream
from ragcache_gateway.http.streaming.client_writer import ClientWriter, client_writer


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
        await self._write_events(writer)
        if writer.is_full:
            await writer.drain()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
