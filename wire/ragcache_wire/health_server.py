"""Health over HTTP, for kubelets without gRPC probes.

``GET /healthz`` answers 200 while the event loop runs. ``GET /readyz`` answers 200 when the service
is ready, else 503 with its progress: ``{"progress": "indexing 12 of 40"}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from http import HTTPStatus

from ragcache_core.errors import InvalidInput

MAX_REQUEST_BYTES = 8 << 10
REQUEST_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 32
"""Bound of concurrent connections. A kubelet needs two or three."""


class HealthServer:
    """Serves the health of one service while its context is entered. It starts as not ready.

    Args:
        listen: "host:port". Port 0 takes a free port; None serves nothing.
    """

    def __init__(self, listen: str | None) -> None:
        self._listen = listen
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._progress: str | None = "starting"
        self.port = 0

    async def __aenter__(self) -> HealthServer:
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
                "RAGCACHE_HEALTH_LISTEN", f"{self._listen} cannot be used: {error}", "free the port"
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def set_progress(self, progress: str) -> None:
        """Report not ready, with the progress."""
        self._progress = progress

    def set_ready(self) -> None:
        """Report ready."""
        self._progress = None

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
                    writer.write(self._reply(request))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # An invalid or slow request gets no answer.
        finally:
            self._connections.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _reply(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        status, body = HTTPStatus.OK, {"status": "alive"}
        if method not in {b"GET", b"HEAD"}:
            status, body = HTTPStatus.METHOD_NOT_ALLOWED, {"error": "only GET is answered"}
        elif path == b"/readyz":
            if self._progress is None:
                body = {"status": "ready"}
            else:
                status, body = HTTPStatus.SERVICE_UNAVAILABLE, {"progress": self._progress}
        elif path != b"/healthz":
            status, body = HTTPStatus.NOT_FOUND, {"error": "ask for /healthz or /readyz"}
        content = json.dumps(body).encode()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + (b"" if method == b"HEAD" else content)
