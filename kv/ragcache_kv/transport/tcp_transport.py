"""The TCP transport: values as plain bytes after a small frame, received into the caller's memory.

The store sends straight from its memory or its file. The client verifies the bytes that have
arrived while later ones are on their way.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from itertools import chain

from typing_extensions import override

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.variant import Miss
from ragcache_core.store_api import Ack, NewVariant, PutOutcome
from ragcache_kv.transport.framed_transport import (
    FramedTransport,
    OpenCall,
    receive_reply,
    send_credential,
)
from ragcache_kv.transport.framing import (
    EARLY_BYTES,
    PIECE_BYTES,
    SOCKET_BUFFER_BYTES,
    ConnectionBroken,
    FramedConnection,
    FrameKind,
    frame,
)
from ragcache_kv.transport.tls_connection import TlsConnection
from ragcache_kv.transport.transport import ValueRequest, to_unavailable
from ragcache_kv.values.buffers import Verifier
from ragcache_kv.values.conversions import (
    checked_hello,
    from_outcome,
    to_completion,
    to_get_request,
)
from ragcache_kv.values.outgoing_value import OutgoingRuns, OutgoingValue
from ragcache_kv.values.stored_value import (
    StoredValue,
    ValueOrMiss,
    allocate_value,
)
from ragcache_wire.peers.credentials import NO_CREDENTIALS, Credentials
from ragcache_wire.v1 import cachestore_pb2 as pb

KEYS_PER_CALL = 64
"""Values of which one call holds leases. The client asks for more when these have arrived."""

GetCall = OpenCall[FramedConnection, pb.DataGetReply]


class TcpTransport(FramedTransport[FramedConnection]):
    """Receives values from the store that listens at an address."""

    name = "socket"

    def __init__(
        self, address: tuple[str, int], boot: bytes, credentials: Credentials = NO_CREDENTIALS
    ) -> None:
        """Connect at the first call. A store with another boot id is refused.

        Args:
            address: Host and port.
            boot: Boot id of the store.
            credentials: With what the client proves that it belongs to the platform.
        """
        super().__init__(self._open)
        self._address = address
        self._boot = boot
        self._credentials = credentials

    @override
    def get(self, request: ValueRequest) -> Iterator[ValueOrMiss]:
        return self._values(request, self._call(request, 0))

    @override
    def put(
        self, variant: NewVariant, value: OutgoingValue, ack: Ack, deadline: float
    ) -> PutOutcome:
        runs = OutgoingRuns(variant, value, deadline)
        first = next(runs)
        early: list[bytes | memoryview] = [first[:EARLY_BYTES]]
        is_sent_whole = runs.are_complete and len(first) <= EARLY_BYTES
        if is_sent_whole:
            early.append(_commit(runs))
        with self.begin_put(variant, ack, deadline, early) as call:
            if not call.reply.granted:
                call.done()
                return from_outcome(call.reply.outcome)
            if not is_sent_whole:
                for run in chain([first[EARLY_BYTES:]], runs):
                    call.connection.send_raw(run)
                call.connection.send_raw(_commit(runs))
            return self.end_put(call)

    def _call(self, request: ValueRequest, start: int) -> GetCall:
        keys = request.keys[start : start + KEYS_PER_CALL]
        message = to_get_request(
            keys,
            request.exact,
            request.domain,
            request.traceparent,
            request.fix_overheads,
        )
        call = self.call(FrameKind.GET, message, FrameKind.GOT, pb.DataGetReply, request.deadline)
        if len(call.reply.values) != len(keys):
            raise ConnectionBroken(f"{len(call.reply.values)} values arrived for {len(keys)} keys")
        return call

    def _values(self, request: ValueRequest, call: GetCall) -> Iterator[ValueOrMiss]:
        start = 0
        while True:
            with call:
                values = _allocate(request, call)
                for index, value in enumerate(values):
                    if isinstance(value, StoredValue):
                        verifier = Verifier(value.parts)
                        _receive(call, value.value, verifier)
                        if not verifier.good:
                            values[index] = Miss.CORRUPT
                    if index == len(values) - 1:  # before the caller works on the last value
                        _release(call, values)
                    yield values[index]
            start += KEYS_PER_CALL
            if start >= len(request.keys):
                return
            try:
                call = self._call(request, start)
            except ConnectionBroken as error:
                raise to_unavailable(error) from error

    def _open(self, deadline: float) -> FramedConnection:
        left_s = deadline - time.monotonic()
        try:
            sock = socket.create_connection(self._address, timeout=max(left_s, 1e-3))
        except OSError as error:
            raise ConnectionBroken(f"{self._address[0]}:{self._address[1]}: {error}") from error
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            certificates = self._credentials.certificates
            if certificates is None:
                connection = FramedConnection(sock)
            else:
                connection = TlsConnection(sock, certificates.current())
            connection.deadline = deadline
            connection.shake_hands()
            send_credential(connection, self._boot, self._credentials.keys)
            hello = checked_hello(receive_reply(connection, FrameKind.WELCOME, pb.HelloReply))
            if hello.boot != self._boot:
                address = f"{self._address[0]}:{self._address[1]}"
                raise ConnectionBroken(f"another store listens on {address}")
        except (OSError, InvalidInput) as error:
            sock.close()
            raise ConnectionBroken(str(error)) from error
        except BaseException:
            sock.close()
            raise
        return connection


def _commit(runs: OutgoingRuns) -> bytes:
    return frame(FrameKind.COMMIT, to_completion(runs.completion()))


def _allocate(request: ValueRequest, call: GetCall) -> list[ValueOrMiss]:
    return [allocate_value(leased.header, request.allocate) for leased in call.reply.values]


def _receive(call: GetCall, target: memoryview, verifier: Verifier) -> None:
    began = time.monotonic()
    try:
        for start in range(0, len(target), PIECE_BYTES):
            piece = target[start : start + PIECE_BYTES]
            call.connection.receive_into(piece)
            verifier.add(piece)
    except ConnectionBroken as error:
        raise to_unavailable(error) from error
    call.seconds += time.monotonic() - began


def _release(call: GetCall, values: list[ValueOrMiss]) -> None:
    """Release all leases and the connection."""
    leases, corrupt = [], []
    for leased, value in zip(call.reply.values, values, strict=True):
        if leased.lease:
            leases.append(leased.lease)
            if value is Miss.CORRUPT:
                corrupt.append(leased.lease)
    call.release(leases, corrupt)
