"""Accepts connections on a port with TLS, and passes on those whose handshake has succeeded.

An event loop's own server counts no connection before the end of its handshake, and takes its
certificate once. Here a connection counts from its first byte, and each one gets the certificate of
that time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from ragcache_gateway.http.connection_limits import ConnectionLimits
from ragcache_wire.watched.server_certificate import ServerCertificate

log = logging.getLogger(__name__)

_RETRY_S: Final = 0.5
"""Time until the next try after the system had no resources for a connection."""


class CountedProtocol(asyncio.Protocol, ABC):
    """A protocol whose connection counts before its handshake has ended."""

    @abstractmethod
    def take_count(self, port: int, address: str) -> None:
        """Take over the count of a connection, until it ends."""

    @abstractmethod
    def end_count(self) -> None:
        """End the count, if it has not ended."""


class TlsListener:
    """Accepts the connections of one listening socket until ``close``.

    Args:
        certificate: What clients are shown.
        limits: Count connections, and bound the time of a handshake as that of a header.
        listening: The socket.
        make_protocol: Makes the protocol of a connection.
    """

    def __init__(
        self,
        certificate: ServerCertificate,
        limits: ConnectionLimits,
        listening: socket.socket,
        make_protocol: Callable[[], CountedProtocol],
    ) -> None:
        listening.setblocking(False)
        self._socket = listening
        self._certificate = certificate
        self._limits = limits
        self._make_protocol = make_protocol
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Accept no more connections, and end handshakes that have not ended."""
        tasks = [self._accepting, *self._handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        port = int(self._socket.getsockname()[1])
        while True:
            try:
                connection, peer = await loop.sock_accept(self._socket)
            except OSError as error:
                log.warning("server: cannot accept a connection port=%d error=%s", port, error)
                await asyncio.sleep(_RETRY_S)
                continue
            address = str(peer[0])
            # Without a handshake there is no way to say why.
            if not self._limits.enter(port, address):
                connection.close()
                continue
            task = asyncio.create_task(self._shake_hands(connection, port, address))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, connection: socket.socket, port: int, address: str) -> None:
        protocol = self._make_protocol()
        protocol.take_count(port, address)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._certificate.current(),
                ssl_handshake_timeout=self._limits.header_timeout_s,
            )
        except OSError as error:  # SSLError and TimeoutError are OSErrors
            protocol.end_count()
            log.debug("server: handshake failed port=%d address=%s error=%s", port, address, error)
        except BaseException:
            protocol.end_count()
            raise
