"""The HTTP server's stop."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import pytest
import uvicorn

from ragcache_gateway.http.server import Drain, DrainingServer, bind_sockets

Message = MutableMapping[str, Any]


class Application:
    """Notes which lifespan messages it gets."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        assert scope["type"] == "lifespan"
        while "lifespan.shutdown" not in self.seen:
            kind = (await receive())["type"]
            self.seen.append(kind)
            await send({"type": f"{kind}.complete"})


@pytest.mark.timeout(30)
@pytest.mark.parametrize("drain_s", [0, 3600])
def test_a_stop_that_comes_before_the_server_runs_is_not_lost(drain_s: float) -> None:
    app, drain = Application(), Drain()
    server = DrainingServer(uvicorn.Config(app, lifespan="on", log_config=None), drain, drain_s)
    before = signal.signal(signal.SIGTERM, server.handle_exit)  # as the gateway's main does
    try:
        signal.raise_signal(signal.SIGTERM)
        server.run(bind_sockets(["127.0.0.1:0"]))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert server.started
    assert drain.has_begun
    assert app.seen == ["lifespan.startup", "lifespan.shutdown"]


@pytest.mark.timeout(30)
def test_a_second_signal_ends_the_drain() -> None:
    drain = Drain()

    async def application(
        _scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        for _ in range(2):
            asyncio.get_running_loop().call_later(0.1, signal.raise_signal, signal.SIGTERM)
        await receive()
        await send({"type": "lifespan.shutdown.complete"})

    config = uvicorn.Config(application, lifespan="on", log_config=None)
    server = DrainingServer(config, drain, drain_s=3600)
    before = signal.signal(signal.SIGTERM, server.handle_exit)  # as the gateway's main does
    try:
        server.run(bind_sockets(["127.0.0.1:0"]))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert drain.has_begun


def test_parts_of_a_stream_do_not_wait_for_each_other() -> None:
    (listening,) = bind_sockets(["127.0.0.1:0"])
    with listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
