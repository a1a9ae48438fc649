"""A small HTTP server for what Kubernetes and Prometheus read: health and metrics.

It bounds the size of requests, their number and their time, and answers GET only.

``GET /healthz`` answers 200 while the event loop runs. ``GET /readyz`` answers 200 when the service
is ready, else 503 with its progress: ``{"progress": "indexing 12 of 40"}``. ``GET /metrics``
answers in Prometheus' formats. An engine serves its metrics on a port that has nothing else, so
that any Prometheus may read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from prometheus_client import CollectorRegistry

from ragcache_core.errors import InvalidInput
from ragcache_wire.telemetry.metric_registry import exposition

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


VARIABLE = "RAGCACHE_METRICS_LISTEN"
START_TIMEOUT_S = 10.0


def metrics_route(collectors: CollectorRegistry) -> Route:
    """Return what answers requests for these metrics."""

    async def answer(accept: str) -> HttpReply:
        # In a thread, because reading levels may visit every variant of a store.
        content_type, body = await asyncio.to_thread(exposition, collectors, accept)
        return HttpReply(HTTPStatus.OK, content_type, body)

    return answer


def metrics_server(listen: str | None, collectors: CollectorRegistry) -> SmallHttpServer:
    """Return a server of metrics for the event loop of a service.

    Args:
        listen: "host:port"; None serves nothing.
        collectors: The metrics.
    """
    return SmallHttpServer(listen, VARIABLE, {"/metrics": metrics_route(collectors)})


class MetricsThread:
    """Serves metrics in a thread of its own, for a process whose event loop is not ours.

    Args:
        listen: "host:port".
        collectors: The metrics.
    """

    def __init__(self, listen: str, collectors: CollectorRegistry) -> None:
        self._server = metrics_server(listen, collectors)
        self._started = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    @property
    def port(self) -> int:
        """The port that is bound; 0 before."""
        return self._server.port

    def start(self) -> None:
        """Serve until the process ends. Raises InvalidInput if the address cannot be used."""
        self._thread.start()
        self._started.wait(START_TIMEOUT_S)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        try:
            await self._server.__aenter__()
        except Exception as error:  # start raises it in the caller's thread
            self._error = error
            return
        finally:
            self._started.set()
        await asyncio.Event().wait()


class HealthServer:
    """Serves the health of one service while its context is entered. It starts as not ready.

    Args:
        listen: "host:port". Port 0 takes a free port; None serves nothing.
        collectors: Metrics to serve. None: no metrics.
    """

    def __init__(self, listen: str | None, collectors: CollectorRegistry | None = None) -> None:
        routes: dict[str, Route] = {"/healthz": self._healthz, "/readyz": self._readyz}
        if collectors is not None:
            routes["/metrics"] = metrics_route(collectors)
        self._server = SmallHttpServer(listen, "RAGCACHE_HEALTH_LISTEN", routes)
        self._progress: str | None = "starting"

    @property
    def port(self) -> int:
        """The port that is bound; 0 before."""
        return self._server.port

    async def __aenter__(self) -> HealthServer:
        """Start to answer. Raises InvalidInput if the address cannot be used."""
        await self._server.__aenter__()
        return self

    def set_progress(self, progress: str) -> None:
        """Report not ready, with the progress."""
        self._progress = progress

    def set_ready(self) -> None:
        """Report ready."""
        self._progress = None

    async def __aexit__(self, *_: object) -> None:
        """Stop answering."""
        await self._server.__aexit__()

    async def _healthz(self, accept: str) -> HttpReply:
        return _reply(HTTPStatus.OK, {"status": "alive"})

    async def _readyz(self, accept: str) -> HttpReply:
        if self._progress is None:
            return _reply(HTTPStatus.OK, {"status": "ready"})
        return _reply(HTTPStatus.SERVICE_UNAVAILABLE, {"progress": self._progress})


def _reply(status: HTTPStatus, body: dict[str, str]) -> HttpReply:
    return HttpReply(status, "application/json", json.dumps(body).encode())
