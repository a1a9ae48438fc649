"""The HTTP server: event loop, parser, sockets, and a stop that readiness announces."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Final, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ragcache_gateway.http.client_writer import CLIENT_CONNECTION, ClientConnection
from ragcache_gateway.http.connection_limits import ConnectionLimits, limited_protocol
from ragcache_gateway.http.tls_listener import CountedProtocol, TlsListener
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.settings.field_types import split_address

log = logging.getLogger(__name__)

BACKLOG: Final = 4096
"""Connections that wait for the event loop. Thousands of clients may connect at once."""

_MAX_END_S: Final = 2.0
"""Time for cancelled requests to end, at most a quarter of the grace period."""


class GatewayProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which also shows its connection to the application."""

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        connection = ClientConnection(self.transport, self.flow)
        self.scope["extensions"] = {CLIENT_CONNECTION: {"connection": connection}}


class Drain:
    """Whether the gateway is about to stop, so that it reports not ready."""

    def __init__(self) -> None:
        self.has_begun = False


class DrainingServer(uvicorn.Server):
    """Reports not ready for some time after SIGTERM, and then stops.

    Load balancers learn from readiness that they must choose another gateway. Until they have, they
    still send requests, and these are answered. A second signal stops at once.

    Requests that last longer than the grace period are cancelled shortly before its end, so that
    their streams can end with an error event.

    Args:
        drain_s: Time between SIGTERM and the stop. 0: stop at once.
        listen: Begins to accept connections of a socket, with what makes their protocols, in place
            of uvicorn. None: uvicorn does.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        drain: Drain,
        drain_s: float,
        listen: Callable[[socket.socket, Callable[[], CountedProtocol]], TlsListener] | None = None,
    ) -> None:
        super().__init__(config)
        self._drain = drain
        self._drain_s = drain_s
        self._listen = listen
        self._listeners: list[TlsListener] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve."""
        self._loop = asyncio.get_running_loop()
        if self._listen is None:
            await super().startup(sockets)
            return
        await super().startup([])
        self._listeners = [self._listen(one, self._make_protocol) for one in sockets or ()]

    def _make_protocol(self) -> CountedProtocol:
        """Return the protocol of a new connection, as uvicorn makes it."""
        make = cast("Callable[..., CountedProtocol]", self.config.http_protocol_class)
        return make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the requests in flight, then close what they use."""
        for listener in self._listeners:
            await listener.close()
        grace_s = self.config.timeout_graceful_shutdown or 0
        wait_s = grace_s - min(_MAX_END_S, grace_s / 4)
        cut = asyncio.get_running_loop().call_later(wait_s, self._cut_requests)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()

    def _cut_requests(self) -> None:
        log.info("server: requests cut count=%d", len(self.server_state.tasks))
        for task in self.server_state.tasks:
            task.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal to stop."""
        is_first = not self._drain.has_begun
        self._drain.has_begun = True
        if is_first and sig == signal.SIGTERM and self._drain_s and self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop_later, sig)
            return
        super().handle_exit(sig, frame)

    def _stop_later(self, sig: int) -> None:
        log.info("server: draining seconds=%g", self._drain_s)
        asyncio.get_running_loop().call_later(self._drain_s, super().handle_exit, sig, None)


def bind_sockets(addresses: Iterable[str]) -> list[socket.socket]:
    """Bind one listening socket for each ``host:port``.

    Raises:
        OSError: An address cannot be bound. No socket stays open.
    """
    sockets: list[socket.socket] = []
    try:
        for address in addresses:
            host, port = split_address(address)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            sockets.append(socket.create_server((host, port), family=family, backlog=BACKLOG))
            # Connections inherit it: no part of a stream waits for the next one. Not every event
            # loop sets it for sockets that it has not made itself.
            sockets[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        for one in sockets:
            one.close()
        raise
    return sockets


def build_server(
    app: ASGIApp, settings: GatewaySettings, connections: ConnectionLimits, drain: Drain
) -> DrainingServer:
    """Build a server that is ready to run."""
    certificate = settings.server_tls_dir
    return DrainingServer(
        uvicorn.Config(
            app,
            # Named, because uvicorn would otherwise choose by what is installed.
            loop="uvloop",
            http=limited_protocol(GatewayProtocol, connections),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            # Headers of a proxy say nothing about who asks.
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=settings.stop_grace_s,
        ),
        drain,
        settings.drain_s,
        None if certificate is None else partial(TlsListener, certificate, connections),
    )
