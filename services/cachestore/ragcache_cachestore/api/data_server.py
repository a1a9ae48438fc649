"""The server of the data transports: it accepts connections over Unix and TCP sockets.

Each connection has one thread and blocks, so a round trip takes two system calls and no event
loop. ``data_connection`` serves the calls, ``ragcache_kv.transport.framing`` has the protocol.

The memory of connections is bounded. Above the bound, a new connection takes the place of the one
that has been idle for longest, first of one whose client has not proved yet that it has a key. Its
client connects again when it needs to. A connection is refused only if all others are in use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Final

from ragcache_cachestore.api.data_connection import (
    FRAME_TIMEOUT_S,
    FRAMES_BYTES,
    ConnectionContext,
    DataConnection,
    HeaderCache,
)
from ragcache_cachestore.storage.malloc import return_freed_memory
from ragcache_cachestore.store import Store
from ragcache_core.errors import InvalidInput
from ragcache_kv.transport.framing import SOCKET_BUFFER_BYTES, FrameLimits
from ragcache_wire.peers.credentials import NO_CREDENTIALS, Credentials
from ragcache_wire.peers.peer_access import PeerGuard
from ragcache_wire.v1 import cachestore_pb2 as pb

log = logging.getLogger(__name__)

CONNECTION_BYTES = 64 << 10
"""Memory of an idle connection with its thread, measured."""

ENCRYPTED_CONNECTION_BYTES = 100 << 10
"""The same of one with TLS, measured."""

MAX_CONNECTIONS_BYTES = 128 << 20
"""Bound of the memory of all connections."""

MAX_CONNECTIONS = MAX_CONNECTIONS_BYTES // CONNECTION_BYTES
MAX_ENCRYPTED_CONNECTIONS = MAX_CONNECTIONS_BYTES // ENCRYPTED_CONNECTION_BYTES

MIN_TRIM_CONNECTIONS = 8
"""When half of this many connections or more have ended, their memory returns to the system."""

FULL_WAIT_S = 0.25
"""How long a new connection waits until one is idle. Clients release leases 50 ms after a read."""

PROOF_WAIT_S = 0.2
"""How long a client has for its proof while there is no room. It is below FULL_WAIT_S, so that
clients without a key cannot keep others out."""

FULL_POLL_S = 0.01

CLOSE_TIMEOUT_S = 5.0
"""How long close waits for calls that wait for the disk."""

RETRY_ACCEPT_S = 0.1

BACKLOG = 64
PROBE_TIMEOUT_S = 1.0
SOCKET_MODE: Final = 0o660
"""A process that can connect to the Unix socket can write to the memory tier."""


class DataServer:
    """Serves the values of a store on a Unix socket and on TCP.

    Args:
        path: Of the Unix socket. None: not offered.
        listen: Host and port of TCP, port 0 for any free port. None: not offered.
        credentials: Of the platform. Without keys, TCP has clients only on loopback, and the file
            permissions protect the Unix socket.

    Attributes:
        port: The TCP port, or 0.
    """

    def __init__(
        self,
        store: Store,
        path: Path | None,
        listen: tuple[str, int] | None,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        """Open the listening sockets.

        Raises:
            InvalidInput: A socket cannot be opened.
        """
        self._store = store
        self._path = path
        self._headers = HeaderCache()
        self._certificates = credentials.certificates
        self._limits = FrameLimits(FRAMES_BYTES, FRAME_TIMEOUT_S)
        host = "localhost" if listen is None else listen[0]
        self._guards = {
            socket.AF_UNIX: PeerGuard(credentials.keys, "localhost:0"),
            socket.AF_INET: (by_network := PeerGuard(credentials.keys, f"{host}:0")),
            socket.AF_INET6: by_network,
        }
        self._peak = 0  # connections since freed memory was returned
        self._lock = threading.Lock()
        self._connections: set[DataConnection] = set()
        self._ending: set[DataConnection] = set()  # evicted, and their threads still run
        self._closed = False
        self._listeners: list[socket.socket] = []
        self._socket_id: tuple[int, int] | None = None
        self.port = 0
        try:
            if path is not None:
                self._listeners.append(listen_unix(path))
                self._socket_id = file_id(path)
            if listen is not None:
                self._listeners.append(listen_tcp(*listen))
                self.port = self._listeners[-1].getsockname()[1]
        except BaseException:
            for listener in self._listeners:
                listener.close()
            raise
        self._threads = [
            threading.Thread(target=self._accept, args=[listener], name="transports", daemon=True)
            for listener in self._listeners
        ]

    def hello(self) -> pb.HelloReply:
        """Return the ids of the store and the transports that it offers."""
        return pb.HelloReply(
            boot=self._store.boot,
            store=self._store.store_id,
            max_value_bytes=self._store.puts.max_value_bytes,
            data_socket="" if self._path is None else str(self._path.absolute()),
            data_port=self.port,
        )

    def start(self) -> None:
        """Accept connections."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End every connection, and wait until none uses the store.

        A call that hangs on the disk is abandoned after CLOSE_TIMEOUT_S.
        """
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        with self._lock:
            self._closed = True
            connections = [*self._connections, *self._ending]
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes accept
            listener.close()
        # Another store may listen at the path by now.
        if self._path is not None and file_id(self._path) == self._socket_id:
            self._path.unlink(missing_ok=True)
        for connection in connections:
            connection.channel.interrupt()
        threads = [*connections, *(thread for thread in self._threads if thread.ident is not None)]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if running := sum(thread.is_alive() for thread in threads):
            log.warning("shutdown: abandoned calls that hang on the disk count=%d", running)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("data server: accept failed error=%s", error)
                time.sleep(RETRY_ACCEPT_S)  # no descriptors are left now
                continue
            try:
                self._serve(sock)
            except Exception:  # no threads are left, for example
                log.exception("data server: cannot serve a connection")
                sock.close()
                time.sleep(RETRY_ACCEPT_S)

    def _serve(self, sock: socket.socket) -> None:
        guard = self._guards[sock.family]
        context = ConnectionContext(
            self._store, self.hello(), self._headers, guard, self._limits, self._certificates
        )
        try:
            connection = DataConnection(context, sock, self._remove)
        except OSError as error:  # the client has left
            log.debug("data server: connection ended before it began error=%s", error)
            sock.close()
            return
        deadline = time.monotonic() + FULL_WAIT_S
        while not self._try_start(connection):
            if self._closed or time.monotonic() >= deadline:
                with self._lock:
                    count = len(self._connections)
                    self._store.note_connections(count, refused=True)
                log.warning("data server: refused a connection, all are in use open=%d", count)
                connection.refuse()
                return
            time.sleep(FULL_POLL_S)

    def _try_start(self, connection: DataConnection) -> bool:
        """Start to serve a connection. Return False if there is no room for it now."""
        with self._lock:
            is_encrypted = self._certificates is not None
            most = MAX_ENCRYPTED_CONNECTIONS if is_encrypted else MAX_CONNECTIONS
            is_full = len(self._connections) >= most
            if self._closed or (is_full and not self._evict_idlest()):
                return False
            count = len(self._connections) + 1
            self._peak = max(self._peak, count)
            # Before the start, so that the statistics never lag behind what a client has seen.
            self._store.note_connections(count, evicted=is_full)
            connection.start()  # within the lock, so that close can join every connection
            self._connections.add(connection)
        return True

    def _evict_idlest(self) -> bool:
        """End the connection that has been idle for longest. The caller has the lock."""
        unproven_before = time.monotonic() - PROOF_WAIT_S
        idle = [
            (connection.is_admitted, since, id(connection), connection)
            for connection in self._connections
            if (since := connection.idle_since) is not None
            if connection.is_admitted or since < unproven_before
        ]
        for *_, connection in sorted(idle):
            if connection.try_evict():
                self._connections.discard(connection)
                self._ending.add(connection)
                return True
        return False

    def _remove(self, connection: DataConnection) -> None:
        with self._lock:
            self._connections.discard(connection)
            self._ending.discard(connection)
            count = len(self._connections)
            self._store.note_connections(count)
            # Not for each one, because it takes milliseconds, and other threads wait meanwhile.
            has_fallen = MIN_TRIM_CONNECTIONS <= self._peak >= 2 * count
            if has_fallen:
                self._peak = count
        if has_fallen:
            return_freed_memory()


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
