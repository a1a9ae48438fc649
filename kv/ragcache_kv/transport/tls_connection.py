"""A connection with frames over TLS, for both ends of the data port."""

from __future__ import annotations

import os
import socket
import ssl
from typing import Final, cast

from typing_extensions import override

from ragcache_core.errors import Unauthenticated, Unavailable
from ragcache_kv.transport.framing import ConnectionBroken, FramedConnection, FrameLimits, TimedOut
from ragcache_kv.transport.transport import SERVICE
from ragcache_wire.peers.certificates import FIX, Certificate

BATCH_BYTES: Final = 128 << 10
"""Bytes that are encrypted before they are sent. One system call for each record of 16 KiB would
take longer than the encryption."""

RECORD_OVERHEAD: Final = 1 / 512
"""Bytes that TLS adds to each byte of full records, rounded up."""

HANDSHAKE_BYTES: Final = 16 << 10

RETRY_AFTER_S: Final = 1.0


class TlsConnection(FramedConnection):
    """One end of an encrypted connection. Both ends show a certificate.

    Args:
        sock: Connected.
        certificate: Of this end.
        limits: What the other end may send. None: this end is the client.
    """

    def __init__(
        self, sock: socket.socket, certificate: Certificate, limits: FrameLimits | None = None
    ) -> None:
        super().__init__(sock, limits)
        self._is_client = limits is None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        if self._is_client:
            self._tls = certificate.client.wrap_bio(
                self._incoming, self._outgoing, server_hostname=certificate.name
            )
        else:
            self._tls = certificate.server.wrap_bio(
                self._incoming, self._outgoing, server_side=True
            )

    @override
    def shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                try:
                    self._fill(HANDSHAKE_BYTES)
                except TimedOut:
                    raise
                except ConnectionBroken as error:
                    if not self._is_client:
                        raise
                    # The store has no room for another connection, or has stopped.
                    problem = "it ended the connection in the TLS handshake"
                    raise Unavailable(SERVICE, problem, RETRY_AFTER_S) from error
            except ssl.SSLError as error:
                self._flush()  # an alert
                raise _refusal(error) from error
            else:
                self._flush()
                return

    @override
    def refuse(self, reason: bytes) -> None:
        self.close()  # before the handshake there is no way to send a reason

    @property
    @override
    def is_open(self) -> bool:
        return not self._has_read_ahead and super().is_open

    @override
    def spin_wait(self) -> None:
        if not self._has_read_ahead:
            super().spin_wait()

    @override
    def send_raw(self, *data: bytes | memoryview) -> None:
        waiting = 0
        for piece in data:
            rest = memoryview(piece)
            while rest:
                sent = self._tls.write(rest[: BATCH_BYTES - waiting])
                rest, waiting = rest[sent:], waiting + sent
                if waiting >= BATCH_BYTES:
                    self._flush()
                    waiting = 0
        self._flush()

    @override
    def send_file(self, fd: int, offset: int, num_bytes: int) -> None:
        buffer = memoryview(bytearray(min(num_bytes, BATCH_BYTES)))
        while num_bytes:
            count = os.preadv(fd, [buffer[:num_bytes]], offset)
            if not count:
                raise ConnectionBroken("the file ends early")
            self.send_raw(buffer[:count])
            offset += count
            num_bytes -= count

    @override
    def _receive(self, target: memoryview, flags: int) -> int:
        while True:
            try:
                count = cast(int, self._tls.read(len(target), target))  # as it has a buffer
            except ssl.SSLWantReadError:
                self._fill(len(target))
                continue
            except ssl.SSLError as error:
                # A server checks a client's certificate after the handshake of the client.
                raise _refusal(error) from error
            if not count:
                raise ConnectionBroken("the connection was closed")
            return count

    @property
    def _has_read_ahead(self) -> bool:
        return bool(self._incoming.pending or self._tls.pending())

    def _fill(self, num_bytes: int) -> None:
        """Receive encrypted bytes of about as many others, or fewer. Raises ConnectionBroken."""
        num_bytes = min(num_bytes, BATCH_BYTES)
        encrypted = memoryview(bytearray(num_bytes + int(num_bytes * RECORD_OVERHEAD) + 64))
        self._incoming.write(encrypted[: super()._receive(encrypted, 0)])

    def _flush(self) -> None:
        if self._outgoing.pending:
            super().send_raw(self._outgoing.read())


def _refusal(error: ssl.SSLError) -> Unauthenticated:
    reason = getattr(error, "verify_message", "") or error.reason or str(error)
    return Unauthenticated("certificate", f"the TLS handshake failed: {reason}", FIX)
