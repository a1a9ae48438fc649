"""HTTP connections to one engine: kept alive, with a parser in C.

A gateway reads tens of thousands of events a second from its engines. A general client spends much
more time on each of them. Parts of a body are handed over as they arrive: to a task that waits for
them, or to a function without a task switch.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, cast

import httptools

READ_AHEAD_BYTES: Final = 1 << 20
"""Bytes of a body that wait for their reader. Then nothing more is read from the engine."""


class ConnectionProblem(Exception):
    """A request failed; the text says how."""


class ConnectFailed(ConnectionProblem):
    """There was no connection, so nothing of the request has reached the engine."""


class AllConnectionsUsed(ConnectFailed):
    """No more connections to the engine are allowed."""


@dataclass(frozen=True, slots=True)
class ConnectionTimes:
    """Limits on the times of connections, in seconds.

    Attributes:
        connect_s: To connect.
        write_s: For the engine to take a request.
        keepalive_s: A connection that was idle for longer is not used again.
    """

    connect_s: float
    write_s: float
    keepalive_s: float


class EngineConnections:
    """Connections to one engine. Each carries one request at a time.

    Attributes:
        answered_s: When a part of an answer came last, on the clock of time.monotonic.

    Args:
        address: ``host:port`` of the engine.
        authority: Host name and port of requests. None: the address.
        tls: Returns what a new connection checks the server's certificate with, and the name that
            it must have. None: it serves plain HTTP.
        max_connections: Most connections at once. None: no limit.
    """

    def __init__(
        self,
        address: str,
        times: ConnectionTimes,
        *,
        authority: str | None = None,
        tls: Callable[[], tuple[ssl.SSLContext, str]] | None = None,
        max_connections: int | None = None,
    ) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._tls = tls
        self._host_header = f"host: {authority or address}\r\n"
        self._max_connections = max_connections
        self._times = times
        self._connections: set[_Connection] = set()
        self._num_connecting = 0
        self.answered_s = 0.0
        self._idle: deque[tuple[float, _Connection]] = deque()  # the longest idle first

    def close(self) -> None:
        """Close every connection, also those that carry a request."""
        for connection in list(self._connections):
            connection.abort()
        self._idle.clear()

    async def request(
        self, method: str, path: str, *, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> EngineResponse:
        """Send a request and wait for the head of its response. Release the response at the end.

        Raises:
            ConnectFailed: Nothing has reached the engine.
            ConnectionProblem: The engine closed the connection, or did not take the request.
        """
        connection = self._take_idle() or await self._connect()
        connection.carries_answer = method == "POST"
        response = EngineResponse(connection, self)
        lines = [f"{method} {path} HTTP/1.1\r\n", self._host_header]
        lines += [f"{name}: {value}\r\n" for name, value in (headers or {}).items()]
        lines.append(f"content-length: {len(body)}\r\n\r\n")
        try:
            connection.send(response, "".join(lines).encode("latin-1") + body)
            if connection.write_paused:
                try:
                    async with asyncio.timeout(self._times.write_s):
                        await connection.drain()
                except TimeoutError:
                    seconds = f"{self._times.write_s:g} s"
                    raise ConnectionProblem(f"it did not take a request in {seconds}") from None
            await response.wait_for_head()
        except BaseException:
            response.release()
            raise
        return response

    def give_back(self, connection: _Connection) -> None:
        """Keep a connection whose response is complete for the next request."""
        now = asyncio.get_running_loop().time()
        self._idle.append((now, connection))
        while self._idle and now - self._idle[0][0] > self._times.keepalive_s:
            self._idle.popleft()[1].abort()

    def forget(self, connection: _Connection) -> None:
        """Drop a connection that was lost."""
        self._connections.discard(connection)

    def _take_idle(self) -> _Connection | None:
        oldest_s = asyncio.get_running_loop().time() - self._times.keepalive_s
        while self._idle:
            since_s, connection = self._idle.pop()
            if connection.is_open and since_s >= oldest_s:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        used = len(self._connections) + self._num_connecting
        if self._max_connections is not None and used >= self._max_connections:
            raise AllConnectionsUsed("all connections to it are in use")
        self._num_connecting += 1
        context, name = (None, None) if self._tls is None else self._tls()
        try:
            async with asyncio.timeout(self._times.connect_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self),
                    self._host,
                    self._port,
                    ssl=context,
                    server_hostname=name,
                )
        except TimeoutError:
            raise ConnectFailed(f"no connection within {self._times.connect_s:g} s") from None
        except OSError as error:
            raise ConnectFailed(f"{type(error).__name__}: {error}") from error
        finally:
            self._num_connecting -= 1
        self._connections.add(connection)
        return connection


class EngineResponse:
    """A response whose body arrives in parts.

    Attributes:
        status: The status code, once the head has come.
        is_complete: Whether the whole body has arrived; parts of it may not be read yet.
    """

    def __init__(self, connection: _Connection, owner: EngineConnections) -> None:
        self._connection = connection
        self._owner = owner
        self._parts: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._receive: Callable[[bytes | None], None] | None = None
        self._problem: ConnectionProblem | None = None
        self._is_released = False
        self._is_framed = False
        self.status = 0
        self.is_complete = False

    async def wait_for_head(self) -> None:
        """Wait for the status. Raises ConnectionProblem."""
        while not self.status:
            self.raise_problem()
            await self._wait()

    async def read(self) -> bytes | None:
        """Return the next part of the body, or None at its end. Raises ConnectionProblem."""
        while True:
            if self._parts:
                part = self._parts.popleft()
                self._waiting_bytes -= len(part)
                if not self._waiting_bytes:
                    self._connection.resume_reading()
                return part
            if self.is_complete:
                return None
            self.raise_problem()
            await self._wait()

    async def read_all(self, max_bytes: int) -> bytes:
        """Return the rest of the body, or its beginning if it is longer."""
        content = bytearray()
        while len(content) < max_bytes and (part := await self.read()) is not None:
            content += part
        return bytes(content[:max_bytes])

    def deliver_to(self, receive: Callable[[bytes | None], None]) -> None:
        """Have a function called with each part from now on, and with None at the end or a failure.

        Parts that have arrived before are delivered at once.
        """
        self._receive = receive
        while self._parts:
            receive(self._parts.popleft())
        self._waiting_bytes = 0
        self._connection.resume_reading()
        if self.is_complete or self._problem is not None:
            receive(None)

    def stop_delivery(self) -> None:
        """Keep the parts that arrive from now on for ``read``."""
        self._receive = None

    def raise_problem(self) -> None:
        """Raise the ConnectionProblem that ended the response, if one did."""
        if self._problem is not None:
            raise self._problem

    def pause(self) -> None:
        """Read nothing more from the engine until ``resume``."""
        self._connection.pause_reading()

    def resume(self) -> None:
        """Read from the engine again."""
        self._connection.resume_reading()

    def release(self) -> None:
        """Give the connection back if the response is complete, or else close it.

        The engine aborts a request whose connection closes.
        """
        if self._is_released:
            return
        self._is_released = True
        self._receive = None
        if self.is_complete and self._problem is None and self._connection.may_be_reused:
            self._connection.response = None
            self._connection.resume_reading()
            self._owner.give_back(self._connection)
        else:
            self._connection.abort()

    # The connection calls the following.

    def head_received(self, status: int, *, is_framed: bool) -> None:
        """Note the status.

        Args:
            is_framed: Whether the head says where the body ends; else the connection's end does.
        """
        self.status = status
        self._is_framed = is_framed
        self._wake()

    def part_received(self, part: bytes) -> None:
        """Note a part of the body."""
        if self._receive is not None:
            self._receive(part)
            return
        self._parts.append(part)
        self._waiting_bytes += len(part)
        if self._waiting_bytes > READ_AHEAD_BYTES:
            self._connection.pause_reading()
        self._wake()

    def completed(self) -> None:
        """Note the end of the body."""
        self.is_complete = True
        self._end()

    def broke(self, problem: ConnectionProblem) -> None:
        """Note that the connection ended. Does nothing after the end of the body."""
        if self.is_complete or self._problem is not None:
            return
        if self.status and not self._is_framed:
            self.completed()
            return
        self._problem = problem
        self._end()

    def _end(self) -> None:
        if self._receive is not None:
            self._receive(None)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class _Connection(asyncio.Protocol):
    """One connection. Its callbacks belong to asyncio and httptools."""

    def __init__(self, owner: EngineConnections) -> None:
        self._owner = owner
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._reading_paused = False
        self._drained: asyncio.Future[None] | None = None
        self._is_framed = False
        self.write_paused = False
        self.is_open = True
        self.may_be_reused = False
        self.carries_answer = False  # and not a health check
        self.response: EngineResponse | None = None

    def send(self, response: EngineResponse, request: bytes) -> None:
        """Send a request; the response gets what comes."""
        self.response = response
        self.may_be_reused = False
        self._transport.write(request)

    async def drain(self) -> None:
        """Wait until the engine has taken most of the request, or the connection is lost."""
        while self.write_paused and self.is_open:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained

    def abort(self) -> None:
        """Close the connection at once."""
        self.is_open = False
        self._transport.abort()

    def pause_reading(self) -> None:
        """Read nothing until ``resume_reading``."""
        if not self._reading_paused and self.is_open:
            self._reading_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again, if it was paused."""
        if self._reading_paused and self.is_open:
            self._reading_paused = False
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.carries_answer:
            self._owner.answered_s = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"it did not answer with HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._owner.forget(self)
        self.resume_writing()
        self._fail(str(exc) if exc else "it closed the connection")

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def on_message_begin(self) -> None:
        self._is_framed = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in {b"content-length", b"transfer-encoding"}:
            self._is_framed = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.response is None or self.response.is_complete:
            self._fail("it answered without a request")
        elif status >= 200:  # others announce the response that follows
            self.response.head_received(status, is_framed=self._is_framed)

    def on_body(self, part: bytes) -> None:
        if self.is_open and self.response is not None:
            self.response.part_received(part)

    def on_message_complete(self) -> None:
        if self.is_open and self.response is not None and self.response.status:
            self.may_be_reused = self._is_framed and self._parser.should_keep_alive()
            self.response.completed()

    def _fail(self, problem: str) -> None:
        self.is_open = False
        if self.response is not None:
            self.response.broke(ConnectionProblem(problem))
        with contextlib.suppress(AttributeError):  # lost before it was made
            self._transport.abort()
