"""A relay to a cache store that can stall in the middle of a value.

A test can keep a load in progress for as long as it needs, however busy the machine is.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from ragcache_kv.store_client.client import StoreClient

HOST = "127.0.0.2"
"""Another address of this machine. A store names the port of its transport but no host.

A relay of the same ports at this address therefore carries the whole traffic.
"""

READ_BYTES = 1 << 16


class StallingConnection:
    """A relay of a store's ports at HOST, on its own threads.

    The store must offer no transport but TCP.
    """

    def __init__(self, store: str) -> None:
        """Connect to the store at address "host:port"."""
        host, port = store.rsplit(":", 1)
        client = StoreClient(store)
        client.connect(30)
        assert client.hello is not None
        assert client.transport == "socket"
        data_port = client.hello.data_port
        client.close()
        self.address = f"{HOST}:{port}"
        self._changed = threading.Condition()
        self._may_pass: int | None = None
        self._stalls = 0
        self._stalled: set[socket.socket] = set()
        self._connections: set[socket.socket] = set()
        self._listeners = [
            self._listen((host, int(port)), self._pass),
            self._listen((host, data_port), self._pass_or_stall),
        ]

    @classmethod
    @contextlib.contextmanager
    def to(cls, store: str) -> Iterator[StallingConnection]:
        """Yield a relay that at first lets everything through."""
        relay = cls(store)
        try:
            yield relay
        finally:
            relay.resume()
            relay.cut()
            for listener in relay._listeners:
                listener.close()

    def stall(self, after_bytes: int) -> None:
        """Let only after_bytes more bytes of values pass on each connection."""
        with self._changed:
            self._stalls += 1
            self._may_pass = after_bytes

    def wait_until_stalled(self, connections: int = 1, timeout_s: float = 60.0) -> None:
        """Wait until the store has sent more than may pass on so many connections."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._stalled) >= connections, timeout_s)

    @property
    def stalled(self) -> int:
        """Return the number of stalled connections."""
        with self._changed:
            return len(self._stalled)

    def resume(self) -> None:
        """Let everything pass."""
        with self._changed:
            self._may_pass = None
            self._changed.notify_all()

    def cut(self) -> None:
        """Close every connection, as the end of the store would. Stalled bytes are lost."""
        with self._changed:
            connections, self._connections = self._connections, set()
            self._changed.notify_all()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _listen(
        self,
        target: tuple[str, int],
        down: Callable[[socket.socket, socket.socket], None],
    ) -> socket.socket:
        listener = socket.create_server((HOST, target[1]), backlog=64)

        def relay(here: socket.socket) -> None:
            with here, contextlib.suppress(OSError), socket.create_connection(target) as there:
                with self._changed:
                    self._connections |= {here, there}
                up = threading.Thread(target=self._pass, args=[here, there], daemon=True)
                up.start()
                down(there, here)
                up.join()

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    here, _ = listener.accept()
                    threading.Thread(target=relay, args=[here], daemon=True).start()

        threading.Thread(target=accept, name="relay", daemon=True).start()
        return listener

    @staticmethod
    def _pass(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(READ_BYTES):
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _pass_or_stall(self, source: socket.socket, target: socket.socket) -> None:
        stall = passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(READ_BYTES):
                with self._changed:
                    if self._stalls != stall:
                        stall, passed = self._stalls, 0
                    room = len(data) if self._may_pass is None else self._may_pass - passed
                passed += len(data)
                target.sendall(data[:room])
                if room < len(data) and not self._wait_for_resume(target):
                    break
                target.sendall(data[room:])
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _wait_for_resume(self, target: socket.socket) -> bool:
        """Wait until the relay resumes. Return False if the connection was closed."""
        with self._changed:
            self._stalled.add(target)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._may_pass is None or target not in self._connections
            )
            self._stalled.discard(target)
            return target in self._connections
