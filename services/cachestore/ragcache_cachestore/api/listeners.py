"""Opens the listening sockets of the data transports."""

from __future__ import annotations

import os
import resource
import socket
import stat
from pathlib import Path
from typing import Final

from ragcache_core.errors import InvalidInput
from ragcache_kv.transport.framing import SOCKET_BUFFER_BYTES

BACKLOG = 64
PROBE_TIMEOUT_S = 1.0
SOCKET_MODE: Final = 0o660
"""A process that can connect to the Unix socket can write to the memory tier."""


def allow_many_sockets() -> None:
    """Raise the process's limit of open files as far as it may. The default is often 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen_unix(path: Path) -> socket.socket:
    """Listen on a Unix socket at path.

    Raises:
        InvalidInput: The path cannot be used, or another store listens there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale_socket(path)
        listener.bind(str(path))
        os.chmod(path, SOCKET_MODE)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise InvalidInput(
            "RAGCACHE_DATA_SOCKET", f"{path}: {error}", "name a free path of up to 107 bytes"
        ) from error
    return listener


def listen_tcp(host: str, port: int) -> socket.socket:
    """Listen on TCP.

    Raises:
        InvalidInput: The address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit the buffer sizes. Set later, they would not count for the TCP window.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        listener.bind((host.strip("[]"), port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise InvalidInput(
            "RAGCACHE_DATA_LISTEN", f"{host}:{port}: {error}", "name an address of this machine"
        ) from error
    return listener


def file_id(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a path, or None if there is no file."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _remove_stale_socket(path: Path) -> None:
    """Remove the socket of a store that was killed, and no other file. Raises OSError."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return  # bind reports that the path is in use
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
