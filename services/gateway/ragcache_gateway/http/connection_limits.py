"""Limits of connections: how many there are, and how long a request's header may take.

uvicorn waits for ever for the rest of a header, and accepts any number of connections. A client
that sends one byte at a time could so hold sockets and memory without an end.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from typing import Any, Final

from ragcache_gateway.http.errors import error_body
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_wire.watched.limits import Limits

log = logging.getLogger(__name__)

_BODY: Final = json.dumps(
    error_body(
        "too many connections are open already; close some of this address, or try again",
        "service_unavailable_error",
        code="too_many_connections",
    )
).encode()
_REFUSAL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


class ConnectionLimits:
    """Counts the connections of each port, so that clients of one cannot fill the other.

    An address gets at most as many as it leaves free, so that no address takes those of all others.
    A proxy has one address for all its clients, and so half of the connections for them.
    Source: dynamic thresholds (Choudhury and Hahne, IEEE/ACM Transactions on Networking 1998).

    Args:
        limits: Say how many connections a port may have.
        header_timeout_s: Time for the whole header of a request to arrive: from the connection, or
            from the first byte after an earlier request.
    """

    def __init__(self, limits: Limits, header_timeout_s: float, metrics: Metrics) -> None:
        self._limits = limits
        self.header_timeout_s = header_timeout_s
        self._metrics = metrics
        self._open: Counter[int] = Counter()  # by port
        self._of_address: Counter[tuple[int, str]] = Counter()

    def enter(self, port: int, address: str) -> bool:
        """Count a new connection of a client's address. Return whether there is room for it."""
        free = self._limits.current().connections - self._open[port]
        if free <= 0 or self._of_address[port, address] > free:
            self._metrics.connections_refused.inc()
            return False
        self._open[port] += 1
        self._of_address[port, address] += 1
        self._show()
        return True

    def leave(self, port: int, address: str) -> None:
        """Count the end of a connection that had room."""
        self._open[port] -= 1
        self._of_address[port, address] -= 1
        if not self._of_address[port, address]:
            del self._of_address[port, address]
        self._show()

    def record_slow_header(self) -> None:
        """Count a connection that is closed because its header took too long."""
        self._metrics.slow_headers.inc()

    def _show(self) -> None:
        self._metrics.connections.set(self._open.total())


def limited_protocol(protocol: type[Any], limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """Return one of uvicorn's HTTP protocols with these limits, as its setting ``http`` takes it.

    Args:
        protocol: ``H11Protocol`` or ``HttpToolsProtocol``. Both have the request that they serve in
            ``cycle``, from the end of its header on.
    """

    class LimitedProtocol(protocol):  # type: ignore[misc]  # which of the two, a caller says
        """A connection that counts, and whose headers have a deadline."""

        _counted: tuple[int, str] | None = None  # port and address of a connection that counts
        _header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if self._counted is None:
                port = int((transport.get_extra_info("sockname") or ("", 0))[1])
                address = str((transport.get_extra_info("peername") or ("",))[0])
                if not limits.enter(port, address):
                    transport.write(_REFUSAL)
                    transport.close()
                    return
                self.take_count(port, address)
            self._start_header()

        def take_count(self, port: int, address: str) -> None:
            """Take over the count of a connection that was counted before its handshake."""
            self._counted = port, address

        def end_count(self) -> None:
            """Count the end of the connection, once."""
            if self._counted is not None:
                limits.leave(*self._counted)
                self._counted = None

        def data_received(self, data: bytes) -> None:
            if self._counted is None:
                return  # refused
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._end_header()
            elif self._header_timer is None:
                self._start_header()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_header()
            self.end_count()
            super().connection_lost(exc)

        def _start_header(self) -> None:
            loop = asyncio.get_running_loop()
            self._header_timer = loop.call_later(limits.header_timeout_s, self._close_slow)

        def _end_header(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _close_slow(self) -> None:
            self._header_timer = None
            if not self.transport.is_closing():
                limits.record_slow_header()
                self.transport.close()

    return LimitedProtocol
