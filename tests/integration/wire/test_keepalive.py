"""Pings of clients, which notice lost peers, and servers, which close connections with too many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio
import pytest

from ragcache_wire.channel import (
    MIN_PING_INTERVAL_MS,
    OPTIONS,
    SERVER_OPTIONS,
    Option,
    with_options,
)
from ragcache_wire.clients import retriever_client

PING_MS, ANSWER_MS = 1_000, 600_000
METHOD = "/ragcache.test.Silent/Watch"


async def received(server_options: Sequence[Option], silent_s: float) -> list[bytes]:
    """Return what a client that pings each second gets of a silent stream."""

    async def silent(_request: bytes, _context: object) -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.sleep(silent_s)
        yield b"last"

    server = grpc.aio.server(options=server_options)
    handler = grpc.unary_stream_rpc_method_handler(silent)
    service, name = METHOD[1:].split("/")
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {name: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    found = []
    pings = ("grpc.keepalive_time_ms", PING_MS), ("grpc.keepalive_timeout_ms", ANSWER_MS)
    options = with_options(OPTIONS, *pings)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            async for part in channel.unary_stream(METHOD, bytes, bytes)(b""):
                found.append(part)
    except grpc.aio.AioRpcError as error:
        found.append(str(error.details()).encode())
    finally:
        await server.stop(0)
    return found


async def test_a_server_bears_the_pings_that_its_options_allow() -> None:
    interval = ("grpc.http2.min_ping_interval_without_data_ms", PING_MS // 2)
    allowing = with_options(SERVER_OPTIONS, interval)
    allowed, refused = await asyncio.gather(received(allowing, 6.0), received((), 240.0))
    assert allowed == [b"first", b"last"]
    assert refused == [b"first", b"Too many pings"], "what gRPC allows by default"


@pytest.mark.parametrize("options", [OPTIONS, retriever_client.CHANNEL_OPTIONS])
def test_every_client_pings_less_often_than_servers_allow(options: list[Option]) -> None:
    values = dict(options)
    assert len(values) == len(options), "gRPC takes the first of two values"
    assert int(values["grpc.keepalive_time_ms"]) > MIN_PING_INTERVAL_MS
    assert dict(SERVER_OPTIONS)["grpc.http2.min_ping_interval_without_data_ms"] == (
        MIN_PING_INTERVAL_MS
    )


def test_a_lost_replica_of_the_retriever_is_noticed_within_ten_seconds() -> None:
    values = dict(retriever_client.CHANNEL_OPTIONS)
    noticed_ms = values["grpc.keepalive_time_ms"], values["grpc.keepalive_timeout_ms"]
    assert sum(map(int, noticed_ms)) < 10_000
