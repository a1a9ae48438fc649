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
from ragcache_kv.transport.framed_transport import Asked, FramedTransport, answer
from ragcache_kv.transport.framing import (
    EARLY_BYTES,
    PIECE_BYTES,
    SOCKET_BUFFER_BYTES,
    Broken,
    Channel,
    Kind,
    frame,
)
from ragcache_kv.transport.transport import Asking, no_answer
from ragcache_kv.values.buffers import Verifier
from ragcache_kv.values.conversions import (
    from_hello,
    from_outcome,
    to_completion,
    to_get_request,
)
from ragcache_kv.values.outgoing_value import Outgoing, Runs
from ragcache_kv.values.stored_value import Answer, Layers, StoredValue, announced, num_layers
from ragcache_wire.v1 import cachestore_pb2 as pb

KEYS_PER_CALL = 64
"""Values that one call holds leases of. More are asked for when these have come."""


class TcpTransport(FramedTransport[Channel]):
    """Receives from the store whose transport listens on host and port."""

    name = "socket"

    def __init__(self, host: str, port: int, boot: bytes) -> None:
        """boot: what the store has said; another one at the port is Broken."""
        super().__init__(self._open)
        self._address = (host, port)
        self._boot = boot

    def get(self, asking: Asking) -> Iterator[Answer]:
        """See Transport."""
        return self._values(asking, self._ask(asking, 0, KEYS_PER_CALL, by_layer=False))

    def get_layers(self, asking: Asking) -> Layers:
        """See Transport. Holds leases of all values until the last layer."""
        asked = self._ask(asking, 0, len(asking.keys), by_layer=True)
        values = asked.keep(lambda: _announced(asking, asked))
        return Layers(list(values), _layers(asked, values))

    def put(self, variant: NewVariant, value: Outgoing, ack: Ack, deadline: float) -> PutOutcome:
        """See Transport."""
        runs = Runs(variant, value, deadline)
        first = next(runs)
        early: list[bytes | memoryview] = [first[:EARLY_BYTES]]
        whole = runs.are_over and len(first) <= EARLY_BYTES
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
        self, asking: Asking, start: int, count: int, by_layer: bool
    ) -> Asked[Channel, pb.DataGetReply]:
        keys = asking.keys[start : start + count]
        request = to_get_request(keys, asking.exact, asking.domain, by_layer, asking.traceparent)
        asked = self.ask(Kind.GET, request, Kind.GOT, pb.DataGetReply, asking.deadline)
        if len(asked.reply.values) != len(keys):
            raise Broken(f"{len(asked.reply.values)} answers for {len(keys)} keys")
        return asked

    def _values(self, asking: Asking, asked: Asked[Channel, pb.DataGetReply]) -> Iterator[Answer]:
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
            except Broken as error:
                raise no_answer(error) from error

    def _open(self, deadline: float) -> Channel:
        left_s = deadline - time.monotonic()
        try:
            sock = socket.create_connection(self._address, timeout=max(left_s, 1e-3))
        except OSError as error:
            raise Broken(f"{self._address[0]}:{self._address[1]}: {error}") from error
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            connection = Channel(sock)
            connection.deadline = deadline
            hello = from_hello(answer(connection, Kind.WELCOME, pb.HelloReply))
            if hello.boot != self._boot:
                raise Broken(f"another store is at {self._address[0]}:{self._address[1]}")
        except (OSError, InvalidInput) as error:
            sock.close()
            raise Broken(str(error)) from error
        except BaseException:
            sock.close()
            raise
        return connection


def _layers(
    asked: Asked[Channel, pb.DataGetReply], values: list[Answer]
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


def _commit(runs: Runs) -> bytes:
    return frame(Kind.COMMIT, to_completion(runs.completion()))


def _announced(asking: Asking, asked: Asked[Channel, pb.DataGetReply]) -> list[Answer]:
    return [announced(found.header, asking.allocate) for found in asked.reply.values]


def _receive(
    asked: Asked[Channel, pb.DataGetReply], target: memoryview, verifier: Verifier
) -> None:
    began = time.monotonic()
    try:
        for start in range(0, len(target), PIECE_BYTES):
            piece = target[start : start + PIECE_BYTES]
            asked.connection.receive_into(piece)
            verifier.add(piece)
    except Broken as error:
        raise no_answer(error) from error
    asked.seconds += time.monotonic() - began


def _release(asked: Asked[Channel, pb.DataGetReply], values: list[Answer]) -> None:
    """Let go of all leases, and of the connection."""
    leases, corrupt = [], []
    for one, value in zip(asked.reply.values, values, strict=True):
        if one.lease:
            leases.append(one.lease)
            if value is Miss.CORRUPT:
                corrupt.append(one.lease)
    asked.release(leases, corrupt)
