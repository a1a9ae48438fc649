"""What the transports with frames share: a pool of connections, and calls over one of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, Self, TypeVar

from google.protobuf.message import Message
from typing_extensions import override

from ragcache_core.errors import InvalidInput, RagCacheError, Unavailable
from ragcache_core.store_api import Ack, NewVariant, PutOutcome
from ragcache_kv.transport.framing import (
    MAX_REPLY_BYTES,
    ConnectionBroken,
    ConnectionEvicted,
    FramedConnection,
    FrameKind,
    TooManyCalls,
    from_error,
    parse,
)
from ragcache_kv.transport.transport import SERVICE, Transport
from ragcache_kv.values.conversions import from_outcome, to_put_header
from ragcache_wire.peers.peer_access import proof_for
from ragcache_wire.tracing import traceparent
from ragcache_wire.v1 import cachestore_pb2 as pb
from ragcache_wire.watched.signing_keys import SigningKeys

MAX_CONNECTIONS = 8
"""Connections of one client to one store. Further calls wait for one, within their deadlines."""

MAX_EVICTED_TRIES = 4
"""Connections that one call may lose to the store's eviction. It fails after that."""

DEFERRED_SEND_S = 0.05
"""How long a deferred message waits for a call that it can go out with."""

T = TypeVar("T")
C = TypeVar("C", bound=FramedConnection)
M = TypeVar("M", bound=Message)


class ConnectionPool(Generic[C]):
    """At most MAX_CONNECTIONS connections, each for one call at a time. Safe for threads."""

    def __init__(self, connect: Callable[[float], C]) -> None:
        """Keep how to connect.

        Args:
            connect: Connects by a deadline; raises ConnectionBroken.
        """
        self._connect = connect
        # Reentrant: an abandoned call ends on any thread on which Python frees it.
        self._changed = threading.Condition(threading.RLock())
        self._idle: list[C] = []
        self._used: set[C] = set()
        self._connecting = 0
        self._closed = False
        self._has_deferred = threading.Event()
        self._sender: threading.Thread | None = None

    def take(self, deadline: float) -> C:
        """Return a connection for one call, which gives or drops it.

        If the store refuses another connection, the call waits for one that this client has.

        Raises:
            ConnectionBroken: No connection can be made.
            TooManyCalls: No connection became free by the deadline.
            RagCacheError: The store refused the connection, and this client has no other.
        """
        refused: Unavailable | None = None
        while True:
            connection = self._take_idle(deadline, refused)
            if connection is not None:
                return connection
            try:
                connection = self._connect(deadline)
            except BaseException as error:
                with self._changed:
                    self._connecting -= 1
                    self._changed.notify()
                    if not isinstance(error, Unavailable) or not self._used:
                        raise
                refused = error
                continue
            with self._changed:
                self._connecting -= 1
                self._used.add(connection)
            return connection

    def _take_idle(self, deadline: float, refused: Unavailable | None) -> C | None:
        """Return an idle connection, or None if the caller must connect and is counted for that.

        Args:
            refused: Why the store has refused another connection.
        """
        with self._changed:
            while not self._closed and self._must_wait(refused is not None):
                if not self._changed.wait(deadline - time.monotonic()):
                    problem = f"this client already makes {len(self._used)} calls"
                    raise TooManyCalls(problem if refused is None else f"{problem}, and {refused}")
            if self._closed:
                raise ConnectionBroken("the transport is closed")
            while self._idle:
                connection = self._idle.pop()
                if connection.is_open:
                    self._used.add(connection)
                    return connection
                connection.close()  # evicted by the store, or the store has stopped
            self._connecting += 1
        return None

    def _must_wait(self, refused: bool) -> bool:
        if refused and self._used and not self._idle:
            return True
        return len(self._used) + self._connecting >= MAX_CONNECTIONS

    def give(self, connection: C) -> None:
        """Take back a connection whose call is complete."""
        with self._changed:
            self._used.discard(connection)
            if self._closed:
                connection.close()
            else:
                self._idle.append(connection)
                if connection.deferred:
                    self._schedule_deferred()
            self._changed.notify()

    def drop(self, connection: C) -> None:
        """Close a connection whose call is not complete."""
        connection.close()
        with self._changed:
            self._used.discard(connection)
            self._changed.notify()

    def drop_idle(self) -> None:
        """Close every idle connection: after one broke, the others probably did too."""
        with self._changed:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def retire(self) -> None:
        """Let running calls finish, then close their connections. New calls are refused."""
        self._end(interrupt=False)

    def close(self) -> None:
        """Close every connection."""
        self._end(interrupt=True)

    def _end(self, *, interrupt: bool) -> None:
        with self._changed:
            self._closed = True
            for connection in self._used if interrupt else ():
                connection.interrupt()  # the thread that uses it closes it
            self._changed.notify_all()
            self._has_deferred.set()
        self.drop_idle()

    def _schedule_deferred(self) -> None:
        """Have the deferred messages of idle connections sent soon. Called under the lock."""
        if not self._has_deferred.is_set():
            self._has_deferred.set()
        if self._sender is None:
            self._sender = threading.Thread(
                target=self._send_deferred, name="store releases", daemon=True
            )
            self._sender.start()

    def _send_deferred(self) -> None:
        while True:
            self._has_deferred.wait()
            self._has_deferred.clear()
            time.sleep(DEFERRED_SEND_S)
            with self._changed:
                if self._closed:
                    return
                waiting = [connection for connection in self._idle if connection.deferred]
                self._idle = [connection for connection in self._idle if not connection.deferred]
                self._used.update(waiting)
            for connection in waiting:
                connection.deadline = time.monotonic() + DEFERRED_SEND_S
                try:
                    connection.send_deferred()
                except ConnectionBroken:
                    self.drop(connection)
                else:
                    self.give(connection)


class OpenCall(Generic[C, M]):
    """A call with a reply that still uses its connection.

    If the caller leaves the ``with`` block before ``done``, the connection closes. The store then
    drops the call's leases.

    Attributes:
        connection: The connection of the call.
        reply: The first reply.
        asked_at: A time before the store granted the leases of the reply.
        seconds: Time that the call has taken. Callers add the time of reading the values, but not
            the time in which a value waits to be read.
    """

    def __init__(self, pool: ConnectionPool[C], connection: C, reply: M, asked_at: float) -> None:
        self.connection = connection
        self.reply = reply
        self.asked_at = asked_at
        self.seconds = time.monotonic() - asked_at
        self._pool: ConnectionPool[C] | None = pool

    def done(self) -> None:
        """Give the connection back after everything has arrived."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.give(self.connection)

    def release(self, leases: Sequence[int], corrupt: Sequence[int]) -> None:
        """Release the leases after everything has arrived.

        Args:
            leases: All leases of the reply.
            corrupt: The leases whose bytes did not match their checksums.
        """
        release = pb.LeaseRelease(leases=leases, corrupt=corrupt, seconds=self.seconds)
        if corrupt:
            # Not deferred: the caller may put the value again, so the store must have dropped it.
            try:
                self.connection.send(FrameKind.RELEASE, release)
                kind, _ = self.connection.receive(MAX_REPLY_BYTES)
                if kind != FrameKind.RELEASED:
                    raise ConnectionBroken(f"a frame of kind {kind} arrived instead of RELEASED")
            except ConnectionBroken:
                self.drop()  # and with it the leases
                return
        elif leases:
            self.connection.deferred.append((FrameKind.RELEASE, release))
        self.done()

    def drop(self) -> None:
        """Close the connection, unless the call is done."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.drop(self.connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def __del__(self) -> None:
        self.drop()  # the caller never read the values


class FramedTransport(Transport, Generic[C]):
    """A transport over its own pool of connections."""

    def __init__(self, connect: Callable[[float], C]) -> None:
        """Make the pool.

        Args:
            connect: Connects by a deadline; raises ConnectionBroken.
        """
        self.pool = ConnectionPool(connect)

    @override
    def close(self) -> None:
        self.pool.close()

    def begin_put(
        self,
        variant: NewVariant,
        ack: Ack,
        deadline: float,
        early: Sequence[bytes | memoryview] = (),
    ) -> OpenCall[C, pb.PutGrant]:
        """Ask the store to accept a value. Raises as call."""
        header = to_put_header(variant, ack, traceparent())
        return self.call(FrameKind.PUT, header, FrameKind.GRANT, pb.PutGrant, deadline, early)

    def end_put(self, call: OpenCall[C, pb.PutGrant]) -> PutOutcome:
        """Wait for the outcome of a put, after its COMMIT.

        Raises:
            ConnectionBroken: The connection ended.
            RagCacheError: The store's error.
        """
        try:
            reply = receive_reply(call.connection, FrameKind.PUT_DONE, pb.PutReply)
        except RagCacheError:
            call.done()
            raise
        call.done()
        return from_outcome(reply.outcome)

    def call(
        self,
        kind: FrameKind,
        message: Message,
        reply_kind: FrameKind,
        reply_type: type[M],
        deadline: float,
        early: Sequence[bytes | memoryview] = (),
    ) -> OpenCall[C, M]:
        """Send a message and wait for the reply.

        Args:
            kind: Kind of the frame to send.
            message: Its message.
            reply_kind: Kind of the reply.
            reply_type: Type of the reply's message.
            deadline: On the clock of time.monotonic.
            early: Bytes that follow the frame, which the store may skip.

        Raises:
            ConnectionBroken: The connection ended.
            RagCacheError: The store's error. The connection stays usable.
        """
        for _ in range(MAX_EVICTED_TRIES - 1):
            try:
                return self._call_once(kind, message, reply_kind, reply_type, deadline, early)
            except ConnectionEvicted:
                continue
        return self._call_once(kind, message, reply_kind, reply_type, deadline, early)

    def _call_once(
        self,
        kind: FrameKind,
        message: Message,
        reply_kind: FrameKind,
        reply_type: type[M],
        deadline: float,
        early: Sequence[bytes | memoryview],
    ) -> OpenCall[C, M]:
        connection = self.pool.take(deadline)
        asked_at = time.monotonic()
        try:
            connection.deadline = deadline
            connection.send(kind, message, early, skippable=True)
            connection.spin_wait()
            reply = receive_reply(connection, reply_kind, reply_type)
        except RagCacheError:
            self.pool.give(connection)
            raise
        except BaseException:
            self.pool.drop(connection)
            raise
        return OpenCall(self.pool, connection, reply, asked_at)


def send_credential(connection: FramedConnection, boot: bytes, keys: SigningKeys | None) -> None:
    """Answer the challenge with which a store begins a connection.

    Args:
        boot: Id of the store's start that the client expects.
        keys: The platform's signing keys. None: the client proves nothing.

    Raises:
        ConnectionBroken: The connection ended.
        RagCacheError: The store refused the connection.
    """
    message = receive_reply(connection, FrameKind.CHALLENGE, pb.DataChallenge)
    proof = proof_for(keys, message.challenge, boot)
    connection.send(FrameKind.CREDENTIAL, pb.DataCredential(proof=proof))


def receive_reply(connection: FramedConnection, reply_kind: FrameKind, reply_type: type[M]) -> M:
    """Receive a frame of reply_kind. Raises ConnectionBroken, and the store's error."""
    kind, payload = connection.receive(MAX_REPLY_BYTES)
    if kind == reply_kind:
        return _parse(reply_type, payload)
    if kind == FrameKind.ERROR:
        raise from_error(SERVICE, _parse(pb.DataError, payload))
    if kind == FrameKind.EVICTED:
        raise ConnectionEvicted("the store has ended this connection, which was idle")
    raise ConnectionBroken(f"a frame of kind {kind} arrived instead of {reply_kind.name}")


def _parse(message_type: type[M], payload: memoryview) -> M:
    try:
        return parse(message_type, payload)
    except InvalidInput as error:
        raise ConnectionBroken(str(error)) from error
