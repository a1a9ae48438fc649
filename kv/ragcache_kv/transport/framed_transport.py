"""What the transports with frames of their own share: connections, and asking over one of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, Self, TypeVar

from google.protobuf.message import Message

from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_core.store_api import Ack, NewVariant, PutOutcome
from ragcache_kv.transport.framing import (
    MAX_REPLY_BYTES,
    ConnectionBroken,
    FramedConnection,
    FrameKind,
    TooManyCalls,
    from_error,
    parse,
)
from ragcache_kv.transport.transport import PART, Transport
from ragcache_kv.values.conversions import from_outcome, to_put_header
from ragcache_wire.trace_context import traceparent
from ragcache_wire.v1 import cachestore_pb2 as pb

MAX_CONNECTIONS = 8
"""Connections of one client to one store; further calls wait for one, within their deadlines."""

DEFER_S = 0.05
"""How long what is owed to a store waits for a call that it can go with."""

T = TypeVar("T")
C = TypeVar("C", bound=FramedConnection)
M = TypeVar("M", bound=Message)


class ConnectionPool(Generic[C]):
    """At most MAX_CONNECTIONS connections, each for one call at a time. Safe for threads."""

    def __init__(self, connect: Callable[[float], C]) -> None:
        """connect: makes a connection by a deadline. Raises ConnectionBroken."""
        self._connect = connect
        # Reentrant, because a call that is let go of ends wherever Python frees it.
        self._changed = threading.Condition(threading.RLock())
        self._idle: list[C] = []
        self._used: set[C] = set()
        self._connecting = 0
        self._closed = False
        self._owing = threading.Event()
        self._payer: threading.Thread | None = None

    def take(self, deadline: float) -> C:
        """A connection for one call, to be given back or dropped. Raises ConnectionBroken, TooManyCalls."""
        with self._changed:
            while len(self._used) + self._connecting >= MAX_CONNECTIONS and not self._closed:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TooManyCalls(f"{MAX_CONNECTIONS} calls are being made already")
            if self._closed:
                raise ConnectionBroken("the transport is closed")
            if self._idle:
                connection = self._idle.pop()
                self._used.add(connection)
                return connection
            self._connecting += 1
        try:
            connection = self._connect(deadline)
        except BaseException:
            with self._changed:
                self._connecting -= 1
                self._changed.notify()
            raise
        with self._changed:
            self._connecting -= 1
            self._used.add(connection)
        return connection

    def give(self, connection: C) -> None:
        """Nothing more is to come on connection: another call may use it."""
        with self._changed:
            self._used.discard(connection)
            if self._closed:
                connection.close()
            else:
                self._idle.append(connection)
                if connection.owed:
                    self._owe()
            self._changed.notify()

    def drop(self, connection: C) -> None:
        """End a connection whose call did not end well."""
        connection.close()
        with self._changed:
            self._used.discard(connection)
            self._changed.notify()

    def drop_idle(self) -> None:
        """End every connection that no call uses: when one broke they probably have too."""
        with self._changed:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def retire(self) -> None:
        """Let calls in flight end, and their connections with them; none can begin."""
        self._end(interrupt=False)

    def close(self) -> None:
        """End every connection."""
        self._end(interrupt=True)

    def _end(self, *, interrupt: bool) -> None:
        with self._changed:
            self._closed = True
            for connection in self._used if interrupt else ():
                connection.interrupt()  # whoever uses it closes it
            self._changed.notify_all()
            self._owing.set()
        self.drop_idle()

    def _owe(self) -> None:
        """See to it that what idle connections owe is sent soon. Under the lock."""
        if not self._owing.is_set():
            self._owing.set()
        if self._payer is None:
            self._payer = threading.Thread(target=self._pay, name="store releases", daemon=True)
            self._payer.start()

    def _pay(self) -> None:
        while True:
            self._owing.wait()
            self._owing.clear()
            time.sleep(DEFER_S)
            with self._changed:
                if self._closed:
                    return
                owing = [connection for connection in self._idle if connection.owed]
                self._idle = [connection for connection in self._idle if not connection.owed]
                self._used.update(owing)
            for connection in owing:
                connection.deadline = time.monotonic() + DEFER_S
                try:
                    connection.send_deferred()
                except ConnectionBroken:
                    self.drop(connection)
                else:
                    self.give(connection)


class OpenCall(Generic[C, M]):
    """A call that was answered but is not over: its connection is nobody else's.

    As a context it ends with whoever asked: left without ``done``, by an exception say, the
    connection is ended, and with it the call's leases.
    asked_at: no lease of the reply was granted before. seconds: what the call has taken so far; to
    be added to while values are read, and not while they wait to be asked for.
    """

    def __init__(self, pool: ConnectionPool[C], connection: C, reply: M, asked_at: float) -> None:
        self.connection = connection
        self.reply = reply
        self.asked_at = asked_at
        self.seconds = time.monotonic() - asked_at
        self._pool: ConnectionPool[C] | None = pool

    def done(self) -> None:
        """Everything has come."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.give(self.connection)

    def release(self, leases: Sequence[int], corrupt: Sequence[int]) -> None:
        """Everything has come: let go of leases, and say which of them had corrupt bytes."""
        said = pb.LeaseRelease(leases=leases, corrupt=corrupt, seconds=self.seconds)
        if corrupt:
            # Not owed: whoever hears of it puts the value anew, which must not find it held still.
            try:
                self.connection.send(FrameKind.RELEASE, said)
                kind, _ = self.connection.receive(MAX_REPLY_BYTES)
                if kind != FrameKind.RELEASED:
                    raise ConnectionBroken(f"a frame of kind {kind} where RELEASED was due")
            except ConnectionBroken:
                self.drop()  # and with it the leases
                return
        elif leases:
            self.connection.owed.append((FrameKind.RELEASE, said))
        self.done()

    def keep(self, made: Callable[[], T]) -> T:
        """What is made of the reply, for whoever goes on reading; an exception ends the call."""
        try:
            return made()
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """End the connection, unless done."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.drop(self.connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def __del__(self) -> None:
        self.drop()  # of a call whose answers nobody has begun to read


class FramedTransport(Transport, Generic[C]):
    """A transport over connections of its own. connect: makes one by a deadline; raises ConnectionBroken."""

    def __init__(self, connect: Callable[[float], C]) -> None:
        self.pool = ConnectionPool(connect)

    def close(self) -> None:
        """End every connection; calls in flight end too."""
        self.pool.close()

    def begin_put(
        self,
        variant: NewVariant,
        ack: Ack,
        deadline: float,
        early: Sequence[bytes | memoryview] = (),
    ) -> OpenCall[C, pb.PutGrant]:
        """Ask for room for a value. Raises as ask."""
        header = to_put_header(variant, ack, traceparent())
        return self.ask(FrameKind.PUT, header, FrameKind.GRANT, pb.PutGrant, deadline, early)

    def end_put(self, asked: OpenCall[C, pb.PutGrant]) -> PutOutcome:
        """Wait for what becomes of a put, after its COMMIT.

        Raises ConnectionBroken; and what the store has raised.
        """
        try:
            reply = answer(asked.connection, FrameKind.PUT_DONE, pb.PutReply)
        except RagCacheError:
            asked.done()
            raise
        asked.done()
        return from_outcome(reply.outcome)

    def ask(
        self,
        kind: FrameKind,
        message: Message,
        wanted: FrameKind,
        reply_type: type[M],
        deadline: float,
        early: Sequence[bytes | memoryview] = (),
    ) -> OpenCall[C, M]:
        """Send a message and wait for the answer. early: bytes for the store, if it wants them.

        Raises ConnectionBroken; and what the store has raised, after which the connection goes on.
        """
        connection = self.pool.take(deadline)
        asked_at = time.monotonic()
        try:
            connection.deadline = deadline
            connection.send(kind, message, early, skippable=True)
            connection.spin_wait()
            reply = answer(connection, wanted, reply_type)
        except RagCacheError:
            self.pool.give(connection)
            raise
        except BaseException:
            self.pool.drop(connection)
            raise
        return OpenCall(self.pool, connection, reply, asked_at)


def answer(connection: FramedConnection, wanted: FrameKind, reply_type: type[M]) -> M:
    """The next frame, of kind wanted. Raises ConnectionBroken; and what the store has raised."""
    kind, payload = connection.receive(MAX_REPLY_BYTES)
    if kind == wanted:
        return _parse(reply_type, payload)
    if kind == FrameKind.ERROR:
        raise from_error(PART, _parse(pb.DataError, payload))
    raise ConnectionBroken(f"a frame of kind {kind} where {wanted.name} was due")


def _parse(message_type: type[M], payload: memoryview) -> M:
    try:
        return parse(message_type, payload)
    except InvalidInput as error:
        raise ConnectionBroken(str(error)) from error
