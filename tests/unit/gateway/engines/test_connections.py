"""Connections to an engine: kept alive, bounded, and closed when a request is abandoned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from harness.processes import free_port
from ragcache_gateway.engines.connections import (
    READ_AHEAD_BYTES,
    AllConnectionsUsed,
    ConnectFailed,
    ConnectionProblem,
    ConnectionTimes,
    EngineConnections,
)

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\n"


def connections_to(port: int, max_connections: int = 8) -> EngineConnections:
    return EngineConnections(
        f"127.0.0.1:{port}", ConnectionTimes(60, 60, 60), max_connections=max_connections
    )


@asynccontextmanager
async def serving(handle: Handler) -> AsyncGenerator[EngineConnections, None]:
    """Serve each connection with a handler; yields connections to the server."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1")
    found = connections_to(server.sockets[0].getsockname()[1])
    try:
        yield found
    finally:
        found.close()
        server.close()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


async def test_a_connection_is_used_again_after_a_complete_response() -> None:
    num_connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        while await read_request(reader):
            writer.write(OK + b"content-length: 2\r\n\r\nhi")

    async with serving(handle) as connections:
        for _ in range(3):
            response = await connections.request("GET", "/")
            assert (response.status, await response.read_all(10)) == (200, b"hi")
            response.release()
    assert num_connections == 1


async def test_a_response_without_a_request_reaches_nobody() -> None:
    num_connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        while await read_request(reader):
            own, other = (OK + b"content-length: 2\r\n\r\n" + body for body in (b"hi", b"no"))
            writer.write(own + other)

    async with serving(handle) as connections:
        for _ in range(3):
            response = await connections.request("GET", "/")
            assert await response.read_all(10) == b"hi"
            response.release()
    assert num_connections == 3, "such a connection is not used again"


async def test_a_response_that_is_released_early_closes_its_connection() -> None:
    closed = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        try:
            await reader.read()
        finally:
            closed.set()

    async with serving(handle) as connections:
        response = await connections.request("POST", "/")
        assert await response.read() == b"a"
        response.release()
        await asyncio.wait_for(closed.wait(), 60)


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (OK + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n", b"ab"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"content-length: 2\r\n\r\nab", b"ab"),
        (OK + b"\r\nab", b"ab"),  # ends with the connection
    ],
)
async def test_bodies_end_as_their_head_says(answer: bytes, body: bytes) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for at in range(len(answer)):
            writer.write(answer[at : at + 1])
            await writer.drain()

    async with serving(handle) as connections:
        response = await connections.request("GET", "/")
        assert await response.read_all(10) == body
        response.release()


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0\r\n", OK + b"content-length: 9\r\n\r\nab", b"HTTP/1.1 200"]
)
async def test_a_broken_response_is_a_problem(answer: bytes) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)

    async def ask(connections: EngineConnections) -> bytes:
        return await (await connections.request("GET", "/")).read_all(10)

    async with serving(handle) as connections:
        with pytest.raises(ConnectionProblem):
            await ask(connections)


async def test_a_port_without_a_server_is_told_apart_from_a_broken_connection() -> None:
    with pytest.raises(ConnectFailed):
        await connections_to(free_port()).request("GET", "/")


async def test_no_more_connections_are_made_than_allowed() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + b"transfer-encoding: chunked\r\n\r\n")
        await reader.read()

    async with serving(handle) as server:
        connections = connections_to(server._port, max_connections=1)
        first = await connections.request("GET", "/")
        with pytest.raises(AllConnectionsUsed):
            await connections.request("GET", "/")
        first.release()
        connections.close()


async def test_an_engine_waits_while_nobody_reads() -> None:
    part, sent_bytes, is_blocked = bytes(1 << 20), 0, asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent_bytes
        await read_request(reader)
        writer.write(OK + b"content-length: %d\r\n\r\n" % (64 << 20))
        for _ in range(64):
            writer.write(part)
            try:
                async with asyncio.timeout(1):
                    await writer.drain()
            except TimeoutError:
                is_blocked.set()
                await writer.drain()
            sent_bytes += len(part)

    async with serving(handle) as connections:
        response = await connections.request("GET", "/")
        await asyncio.wait_for(is_blocked.wait(), 60)
        # What the kernel's buffers take comes on top.
        assert response._waiting_bytes < 2 * READ_AHEAD_BYTES
        received = await response.read_all(65 << 20)
        assert len(received) == 64 << 20
        response.release()


async def test_parts_are_delivered_without_a_reader() -> None:
    delivered: list[bytes | None] = []
    ended = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + b"content-length: 3\r\n\r\na")
        await writer.drain()
        writer.write(b"bc")

    def deliver(part: bytes | None) -> None:
        delivered.append(part)
        if part is None:
            ended.set()

    async with serving(handle) as connections:
        response = await connections.request("GET", "/")
        response.deliver_to(deliver)
        await asyncio.wait_for(ended.wait(), 60)
        assert delivered[-1] is None
        assert b"".join(part for part in delivered if part) == b"abc"
        response.release()
