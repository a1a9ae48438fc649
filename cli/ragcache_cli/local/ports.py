"""Finds free ports on the loopback interface, and the process that uses a port."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import psutil

from ragcache_core.errors import InvalidInput, Unavailable

LOOPBACK = "127.0.0.1"

# These ports are below the ephemeral range (32768 on Linux). So no outgoing connection takes a port
# between its choice here and its use by a component, or while a component restarts.
_FIRST, _LAST = 20_000, 32_000
_TRIES = 1_000


def free_ports(choice: random.Random) -> Iterator[int]:
    """Yield ports that are free now, each once. Raises Unavailable when none is found."""
    given: set[int] = set()
    for _ in range(_TRIES):
        port = choice.randrange(_FIRST, _LAST)
        if port not in given and is_free(port):
            given.add(port)
            yield port
    raise Unavailable("loopback", f"no free port found in {_FIRST}-{_LAST}")


def is_free(port: int) -> bool:
    """Return whether a server could listen on the port now."""
    with socket.socket() as probe:
        # Servers do the same: connections in TIME_WAIT do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def demand_free(port: int, field: str) -> None:
    """Raise InvalidInput for field unless the port is free."""
    if not is_free(port):
        raise InvalidInput(
            field,
            f"port {port} is in use on {LOOPBACK}{_holder(port)}",
            "stop what uses it, or write another port",
        )


def _holder(port: int) -> str:
    """Return the process that listens on the port, in brackets, if the system reveals it."""
    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN
            if listens and connection.laddr[1:] == (port,) and connection.pid:
                return f" (by {psutil.Process(connection.pid).name()}, pid {connection.pid})"
    except (psutil.Error, OSError):
        pass
    return ""
