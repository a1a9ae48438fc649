"""The transport over TCP: values as plain bytes behind a small frame, received where they will stay.

The store sends straight from its memory or its file, and while later bytes are on their way those
that have come are verified here.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from itertools import chain

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.variant import Miss
from ragcache_core.store_api import Ack, NewVariant, PutOutcome
from ragcache_kv.transport.framed_transport import FramedTransport, OpenCall, answer
from ragcache_kv.transport.framing import (
    EARLY_BYTES,
    PIECE_BYTES,
    SOCKET_BUFFER_BYTES,
    ConnectionBroken,
    FramedConnection,
    FrameKind,
    frame,
)
from ragcache_kv.transport.transport import ValueRequest, to_unavailable
from ragcache_kv.values.buffers import Verifier
from ragcache_kv.values.conversions import (
    from_hello,
    from_outcome,
    to_completion,
    to_get_request,
)
from ragcache_kv.values.outgoing_value import OutgoingRuns, OutgoingValue
from ragcache_kv.values.stored_value import (
    LayeredValues,
    StoredValue,
    ValueOrMiss,
    allocate_value,
    num_layers,
)
from ragcache_wire.v1 import cachestore_pb2 as pb

KEYS_PER_CALL = 64
"""Values that one call holds leases of. More are asked for when these have come."""


class TcpTransport(FramedTransport[FramedConnection]):
    """Receives from the store whose transport listens on host and port."""

    name = "socket"

    def __init__(self, host: str, port: int, boot: bytes) -> None:
        """boot: what the store has said; another one at the port is ConnectionBroken."""
        super().__init__(self._open)
        self._address = (host, port)
        self._boot = boot

    def get(self, asking: ValueRequest) -> Iterator[ValueOrMiss]:
        """See Transport."""
        return self._values(asking, self._ask(asking, 0, KEYS_PER_CALL, by_layer=False))

    def get_layers(self, asking: ValueRequest) -> LayeredValues:
        """See Transport. Holds leases of all values until the last layer."""
        asked = self._ask(asking, 0, len(asking.keys), by_layer=True)
        values = asked.keep(lambda: _announced(asking, asked))
        return LayeredValues(list(values), _layers(asked, values))

    def put(
        self, variant: NewVariant, value: OutgoingValue, ack: Ack, deadline: float
    ) -> PutOutcome:
        """See Transport."""
        runs = OutgoingRuns(variant, value, deadline)
        first = next(runs)
        early: list[bytes | memoryview] = [first[:EARLY_BYTES]]
        whole = runs.are_complete and len(first) <= EARLY_BYTES
        if whole:
            early.append(_commit(runs))
        with self.begin_put(variant, ack, deadline, early) as asked:
            if not asked.reply.granted:
                asked.done()
                return from_outcome(asked.reply.outcome)
            if not whole:
                for run in chain([first[EARLY_BYTES:]], runs):
                    asked.connection.send_raw(run)
                asked.connection.send_raw(_commit(runs))
            return self.end_put(asked)

    def _ask(
        self, asking: ValueRequest, start: int, count: int, by_layer: bool
    ) -> OpenCall[FramedConnection, pb.DataGetReply]:
        keys = asking.keys[start : start + count]
        request = to_get_request(keys, asking.exact, asking.domain, by_layer, asking.traceparent)
        asked = self.ask(FrameKind.GET, request, FrameKind.GOT, pb.DataGetReply, asking.deadline)
        if len(asked.reply.values) != len(keys):
            raise ConnectionBroken(f"{len(asked.reply.values)} answers for {len(keys)} keys")
        return asked

    def _values(
        self, asking: ValueRequest, asked: OpenCall[FramedConnection, pb.DataGetReply]
    ) -> Iterator[ValueOrMiss]:
        start = 0
        while True:
            with asked:
                values = _announced(asking, asked)
                for index, value in enumerate(values):
                    if isinstance(value, StoredValue):
                        verifier = Verifier(value.parts)
                        _receive(asked, value.value, verifier)
                        if not verifier.good:
                            values[index] = Miss.CORRUPT
                    if index == len(values) - 1:  # before whoever asked takes its time
                        _release(asked, values)
                    yield values[index]
            start += KEYS_PER_CALL
            if start >= len(asking.keys):
                return
            try:
                asked = self._ask(asking, start, KEYS_PER_CALL, by_layer=False)
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
            connection = FramedConnection(sock)
            connection.deadline = deadline
            hello = from_hello(answer(connection, FrameKind.WELCOME, pb.HelloReply))
            if hello.boot != self._boot:
                raise ConnectionBroken(f"another store is at {self._address[0]}:{self._address[1]}")
        except (OSError, InvalidInput) as error:
            sock.close()
            raise ConnectionBroken(str(error)) from error
        except BaseException:
            sock.close()
            raise
        return connection


def _layers(
    asked: OpenCall[FramedConnection, pb.DataGetReply], values: list[ValueOrMiss]
) -> Iterator[list[memoryview | Miss]]:
    with asked:
        last = num_layers(values) - 1
        if last < 0:
            _release(asked, values)
        sent = list(values)  # what is corrupt comes all the same
        for layer in range(last + 1):
            given: list[memoryview | Miss] = []
            for index, value in enumerate(sent):
                if isinstance(value, Miss):
                    given.append(value)
                    continue
                part = value.part(layer)
                if part:
                    verifier = Verifier(value.parts[layer : layer + 1])
                    _receive(asked, part, verifier)
                    if not verifier.good:
                        values[index] = Miss.CORRUPT
                given.append(Miss.CORRUPT if values[index] is Miss.CORRUPT else part)
            if layer == last:
                _release(asked, values)
            yield given


def _commit(runs: OutgoingRuns) -> bytes:
    return frame(FrameKind.COMMIT, to_completion(runs.completion()))


def _announced(
    asking: ValueRequest, asked: OpenCall[FramedConnection, pb.DataGetReply]
) -> list[ValueOrMiss]:
    return [allocate_value(found.header, asking.allocate) for found in asked.reply.values]


def _receive(
    asked: OpenCall[FramedConnection, pb.DataGetReply], target: memoryview, verifier: Verifier
) -> None:
    began = time.monotonic()
    try:
        for start in range(0, len(target), PIECE_BYTES):
            piece = target[start : start + PIECE_BYTES]
            asked.connection.receive_into(piece)
            verifier.add(piece)
    except ConnectionBroken as error:
        raise to_unavailable(error) from error
    asked.seconds += time.monotonic() - began


def _release(asked: OpenCall[FramedConnection, pb.DataGetReply], values: list[ValueOrMiss]) -> None:
    """Let go of all leases, and of the connection."""
    leases, corrupt = [], []
    for one, value in zip(asked.reply.values, values, strict=True):
        if one.lease:
            leases.append(one.lease)
            if value is Miss.CORRUPT:
                corrupt.append(one.lease)
    asked.release(leases, corrupt)
