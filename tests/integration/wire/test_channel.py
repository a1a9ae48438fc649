"""A peer that vanishes without closing its connections ends the calls to it within seconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from ragcache_wire.channel import OPTIONS, SERVER_OPTIONS
from ragcache_wire.clients.retriever_client import CHANNEL_OPTIONS
from tests.kit.connection import CuttableConnection
from tests.kit.wait import until

LIMIT_S = 40.0
"""Without a limit of its own for each kind of ping, a call ends after 60 to 80 seconds."""


async def _numbers(request: bytes, context: Any) -> AsyncIterator[bytes]:
    while True:
        yield b"number"
        await asyncio.sleep(0.1)


async def _wait(request: bytes, context: Any) -> bytes:
    await asyncio.Event().wait()
    return b""


@pytest.fixture
async def port() -> AsyncIterator[int]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    methods = {
        "Numbers": grpc.unary_stream_rpc_method_handler(_numbers),
        "Wait": grpc.unary_unary_rpc_method_handler(_wait),
    }
    handlers = grpc.method_handlers_generic_handler("test", methods)
    server.add_generic_rpc_handlers([handlers])
    bound = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield bound
    await server.stop(0)


async def _ended(call: Any) -> float:
    """Return how many seconds a call takes that the lost peer ends.

    Seconds in which this machine stands still do not count.
    """
    num_ticks = 0

    async def tick() -> None:
        nonlocal num_ticks
        while True:
            await asyncio.sleep(0.1)
            num_ticks += 1

    ticking = asyncio.create_task(tick())
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    ticking.cancel()
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    return 0.1 * num_ticks


@pytest.mark.parametrize("is_idle", [True, False])
async def test_a_lost_peer_is_noticed(port: int, is_idle: bool) -> None:
    # An idle connection needs the keepalive, whose default is longer than this test should take.
    options = CHANNEL_OPTIONS if is_idle else OPTIONS
    async with (
        CuttableConnection.to(f"tcp://127.0.0.1:{port}") as link,
        grpc.aio.insecure_channel(f"127.0.0.1:{link.port}", options=options) as channel,
    ):
        wait: Callable[..., Any] = channel.unary_unary("/test/Wait", None, None)
        numbers = channel.unary_stream("/test/Numbers", None, None)(b"")
        for _ in range(5):
            await numbers.read()
        if is_idle:
            numbers.cancel()
        waiting = asyncio.ensure_future(wait(b""))
        await asyncio.sleep(0.5)
        link.hold()
        assert await _ended(waiting) < LIMIT_S
        # A new connection is not answered either.
        assert await _ended(wait(b"")) < LIMIT_S
        link.release()

        async def connects_again() -> bool:
            again = channel.unary_stream("/test/Numbers", None, None)(b"")
            try:
                return bool(await again.read() == b"number")
            except grpc.aio.AioRpcError:
                return False

        await until(connects_again)
