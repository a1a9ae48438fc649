"""A small HTTP server for what Kubernetes and Prometheus read: health and metrics.

It bounds the size of requests, their number and their time, and answers GET only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from ragcache_core.errors import InvalidInput

MAX_REQUEST_BYTES = 8 << 10
REQUEST_TIMEOUT_S = 10.0
"""Time for a whole request. Prometheus waits as long by default."""
MAX_CONNECTIONS = 32
"""Bound of concurrent connections. A kubelet and a Prometheus need four."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A reply with its body."""

    status: HTTPStatus
    content_type: str
    body: bytes


Route = Callable[[str], Awaitable[HttpReply]]
"""Answers a request, given its Accept header."""


class SmallHttpServer:
    """Answers GET requests to some paths while its context is entered.

    Args:
        listen: "host:port". Port 0 takes a free port; None serves nothing.
        variable: The setting with the address, for errors.
        routes: What answers each path.
    """

    def __init__(self, listen: str | None, variable: str, routes: Mapping[str, Route]) -> None:
        self._listen = listen
        self._variable = variable
        self._routes = routes
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> SmallHttpServer:
        """Start to answer. Raises InvalidInput if the address cannot be used."""
        if self._listen is None:
            return self
        host, _, port = self._listen.rpartition(":")
        try:
            self._server = await asyncio.start_server(
                self._answer, host.strip("[]"), int(port), limit=MAX_REQUEST_BYTES
            )
        except OSError as error:
            raise InvalidInput(
                self._variable, f"{self._listen} cannot be used: {error}", "free the port"
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop answering."""
        if self._server is None:
            return
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if len(self._connections) <= MAX_CONNECTIONS:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    request = await reader.readuntil(b"\r\n\r\n")
                    writer.write(await self._reply(request.decode("latin-1")))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # An invalid or slow request gets no answer.
        finally:
            self._connections.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _reply(self, request: str) -> bytes:
        first, *lines = request.split("\r\n")
        method, _, rest = first.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in {"GET", "HEAD"}:
            reply = _error(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered")
        elif (route := self._routes.get(path)) is None:
            reply = _error(HTTPStatus.NOT_FOUND, f"ask for {' or '.join(self._routes)}")
        else:
            reply = await route(_header(lines, "accept"))
        head = (
            f"HTTP/1.1 {reply.status.value} {reply.status.phrase}\r\n"
            f"Content-Type: {reply.content_type}\r\nContent-Length: {len(reply.body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + (b"" if method == "HEAD" else reply.body)


def _header(lines: list[str], name: str) -> str:
    """Return the values of a header, with commas between."""
    headers = (line.partition(":") for line in lines)
    return ",".join(value.strip() for key, _, value in headers if key.strip().lower() == name)


def _error(status: HTTPStatus, problem: str) -> HttpReply:
    return HttpReply(status, "application/json", f'{{"error": "{problem}"}}'.encode())
