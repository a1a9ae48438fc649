"""Writers of streamed bodies: the same bytes with and without the client's connection."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from ragcache_gateway.http.client_writer import (
    CLIENT_CONNECTION,
    AsgiWriter,
    ClientConnection,
    DirectWriter,
    client_writer,
)
from ragcache_gateway.http.disconnect import ClientDisconnected


class Transport:
    def __init__(self) -> None:
        self.written = b""
        self.closing = False

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closing


def connection() -> tuple[ClientConnection, Transport]:
    transport = cast(Any, Transport())
    return ClientConnection(transport, FlowControl(transport)), transport


async def test_parts_are_written_as_chunks_to_the_connection() -> None:
    shown, transport = connection()
    scope = {"extensions": {CLIENT_CONNECTION: {"connection": shown}}}
    writer = client_writer(scope, cast(Any, None), 1)
    assert isinstance(writer, DirectWriter)
    for part in (b"one", b"", b"x" * 17):
        writer.write(part)
    # An empty chunk would end the body.
    assert transport.written == b"3\r\none\r\n11\r\n" + b"x" * 17 + b"\r\n"
    transport.closing = True
    writer.write(b"late")
    assert not transport.written.endswith(b"late\r\n")


async def test_a_client_that_takes_nothing_counts_as_disconnected() -> None:
    shown, _ = connection()
    writer = DirectWriter(shown, 0.01)
    assert not writer.is_full
    shown.flow.pause_writing()
    assert writer.is_full
    with pytest.raises(ClientDisconnected):
        await writer.drain()
    shown.flow.resume_writing()
    await writer.drain()


async def test_without_a_connection_parts_are_sent_at_the_drain() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    writer = client_writer({}, send, 1)
    assert isinstance(writer, AsgiWriter)
    writer.write(b"one")
    writer.write(b"two")
    assert writer.is_full
    await writer.drain()
    assert sent == [{"type": "http.response.body", "body": b"onetwo", "more_body": True}]
    assert not writer.is_full


async def test_a_send_that_takes_too_long_counts_as_disconnected() -> None:
    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    writer = AsgiWriter(send, 0.01)
    writer.write(b"one")
    with pytest.raises(ClientDisconnected):
        await writer.drain()
