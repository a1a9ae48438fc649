"""Blocking client of one cache store: gRPC for control, the fastest transport there is for values.

A miss is a value; an outage is the exception Unavailable, NoAnswer where nothing came back at all.
Only a connection that breaks before the store has answered is tried once more, since a store
that was restarted looks like that; beyond it nothing is tried twice: whoever asks has something
better to do with the time, which is to compute.

Threads may share a client. A process that forks makes its own client in the child: connections
cannot be shared between processes, so one that was inherited refuses every call.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc

from ragcache_core.errors import InvalidInput, RagCacheError, Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss
from ragcache_core.store_api import (
    Ack,
    Deletion,
    Event,
    Hello,
    LookupAnswer,
    LookupKey,
    NewVariant,
    PutOutcome,
)
from ragcache_kv.transport.framed_transport import FramedTransport
from ragcache_kv.transport.framing import ConnectionBroken, TimedOut
from ragcache_kv.transport.grpc_transport import GrpcTransport
from ragcache_kv.transport.shared_memory_transport import SharedMemoryTransport
from ragcache_kv.transport.tcp_transport import TcpTransport
from ragcache_kv.transport.transport import SERVICE, Transport, ValueRequest, to_unavailable
from ragcache_kv.values.conversions import (
    from_deletion,
    from_event,
    from_hello,
    from_lookup_reply,
    to_deletion,
    to_key,
    to_lookup_request,
)
from ragcache_kv.values.outgoing_value import OutgoingValue
from ragcache_kv.values.stored_value import Allocate, LayeredValues, StoredValue
from ragcache_wire.channel import OPTIONS
from ragcache_wire.status import NoAnswer, from_rpc_error
from ragcache_wire.trace_context import metadata, traceparent
from ragcache_wire.v1 import cachestore_pb2 as pb
from ragcache_wire.v1 import cachestore_pb2_grpc

__all__ = [
    "DELETE_TIMEOUT_S",
    "LOOKUP_TIMEOUT_S",
    "SERVICE",
    "TRANSPORTS",
    "StoreClient",
    "StoredValue",
]

log = logging.getLogger("ragcache.store")

LOOKUP_TIMEOUT_S = 1.0
DELETE_TIMEOUT_S = 10.0
TRANSPORTS = ("shared", "socket", "grpc")
"""Every transport, the fastest first."""

FASTER_TRANSPORT_EVERY_S = 60.0
"""How often a transport that did not connect is tried again, while a slower one is in use."""

FASTER_TRANSPORT_TIMEOUT_S = 0.1
"""How long the call that tries it may wait for that."""

R = TypeVar("R")


class StoreClient:
    """Client of the store at address ("host:port"). transports: those to try, in this order.

    transport: the one in use, "" before the first call. hello: what the store has said of itself.
    """

    def __init__(self, address: str, transports: Sequence[str] = TRANSPORTS) -> None:
        """Connects at the first call. Raises InvalidInput for a transport that does not exist."""
        for name in transports:
            if name not in TRANSPORTS:
                raise InvalidInput("transports", f"has {name!r}", f"name some of {TRANSPORTS}")
        self.address = address
        self.hello: Hello | None = None
        self._transports = tuple(transports)
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._stub = cachestore_pb2_grpc.CacheStoreStub(self._channel)
        self._lock = threading.Lock()
        self._transport: Transport | None = None
        self._doubted = False
        self._better_at = float("inf")
        self._pid = os.getpid()

    @property
    def transport(self) -> str:
        """Name of the transport in use; "" before the first call."""
        return "" if self._transport is None else self._transport.name

    def close(self) -> None:
        """Close every connection; calls in flight end."""
        if os.getpid() != self._pid:
            return
        if self._transport is not None:
            self._transport.close()
        self._channel.close()

    def connect(self, timeout_s: float = LOOKUP_TIMEOUT_S) -> None:
        """Connect and pick a transport now. Raises Unavailable."""
        self._connected(time.monotonic() + timeout_s)

    def lookup(
        self,
        wants: Sequence[LookupKey],
        timeout_s: float = LOOKUP_TIMEOUT_S,
        exact: bool = False,
        domain: str = "",
    ) -> LookupAnswer:
        """What is held of wants, without values. Raises Unavailable."""
        deadline = time.monotonic() + timeout_s
        hello, _ = self._connected(deadline)
        request = to_lookup_request(wants, exact, domain)
        reply = self._call(self._stub.Lookup, request, deadline - time.monotonic())
        return _read(lambda: from_lookup_reply(reply, hello.store))

    def get(
        self,
        keys: Sequence[VariantKey],
        timeout_s: float,
        exact: bool = False,
        domain: str = "",
        allocate: Allocate | None = None,
    ) -> Iterator[tuple[VariantKey, StoredValue | Miss]]:
        """Ask now; gives values in the order of keys, each as soon as it is whole and verified.

        exact: only what may stand for a computation. domain: only variants of it; "" for any.
        allocate: gives the memory that a value lands in, in no order of keys; None for new memory;
        asked anew for a value that turns out to be of another size. A value that does not
        match its checksums is Miss.CORRUPT, and the store is told. Raises Unavailable when the
        store goes away or timeout_s ends before the last value. A caller that stops early ends the
        call.
        """
        keys = list(keys)
        if not keys:
            return iter(())
        deadline = time.monotonic() + timeout_s
        request = ValueRequest(keys, deadline, exact, domain, allocate, traceparent())
        answers = self._carry(request.deadline, lambda transport: transport.get(request))
        return self._noting(zip(keys, answers, strict=True))

    def get_layers(
        self,
        keys: Sequence[VariantKey],
        timeout_s: float,
        exact: bool = False,
        domain: str = "",
        allocate: Allocate | None = None,
    ) -> LayeredValues:
        """As get, but layer by layer over all keys, in the order an engine computes."""
        keys = list(keys)
        if not keys:
            return LayeredValues([], iter(()))
        deadline = time.monotonic() + timeout_s
        request = ValueRequest(keys, deadline, exact, domain, allocate, traceparent())
        return self._carry(request.deadline, lambda transport: transport.get_layers(request))

    def put(
        self, variant: NewVariant, value: OutgoingValue, timeout_s: float, ack: Ack = Ack.ACCEPTED
    ) -> PutOutcome:
        """Store a value, each part of it as soon as that is there.

        Raises Unavailable, InvalidInput, and IncompleteValue for a value that does not become whole.
        """
        deadline = time.monotonic() + timeout_s
        return self._carry(deadline, lambda transport: transport.put(variant, value, ack, deadline))

    def note_reads(self, keys: Sequence[VariantKey], timeout_s: float = LOOKUP_TIMEOUT_S) -> None:
        """Say that copies of values that the caller keeps were read, so that they stay hot.

        A hint, which only a store on the same machine takes. Raises Unavailable.
        """
        deadline = time.monotonic() + timeout_s
        self._carry(deadline, lambda transport: transport.note_reads(keys, deadline))

    def prefetch(self, keys: Sequence[VariantKey], timeout_s: float = LOOKUP_TIMEOUT_S) -> int:
        """Bring values from disk into memory, in the background; for how many that begins."""
        request = pb.PrefetchRequest(keys=map(to_key, keys))
        return self._call(self._stub.Prefetch, request, timeout_s).started

    def delete(self, deletion: Deletion, timeout_s: float = DELETE_TIMEOUT_S) -> int:
        """Remove what deletion names, for good when this returns; how many variants went."""
        request = pb.DeleteRequest(deletion=to_deletion(deletion))
        return self._call(self._stub.Delete, request, timeout_s).removed

    def tombstones(self, since_ms: int, idle_s: float = DELETE_TIMEOUT_S) -> Iterator[Deletion]:
        """Deletes that the store has applied since then (Unix time), in that order.

        There may be many, so that it is idle_s that the next one may take. A caller that stops
        early ends the call. Raises Unavailable.
        """
        self._require_own()
        request = pb.TombstonesRequest(since_ms=since_ms)
        call: Any = self._stub.Tombstones(request, metadata=metadata(traceparent()))
        return _read_deletions(call, idle_s)

    def change_replica(
        self, key: VariantKey, shard: str, drop: bool, timeout_s: float = LOOKUP_TIMEOUT_S
    ) -> bool:
        """Make a copy of a variant on another shard, or drop it there; whether that changed it."""
        request = pb.ChangeReplicaRequest(key=to_key(key), shard=shard, drop=drop)
        return self._call(self._stub.ChangeReplica, request, timeout_s).changed

    def watch(
        self, boot: bytes = b"", after: int = 0, timeout_s: float | None = None
    ) -> Iterator[Event]:
        """Events after one of a boot, if they are still remembered; else a snapshot, then events.

        Ends with timeout_s (None: never by itself). A caller that stops early ends the call.
        """
        self._require_own()
        request = pb.WatchRequest(boot=boot, after=after)
        parent = metadata(traceparent())
        call: Any = self._stub.Watch(request, timeout=timeout_s, metadata=parent)
        return _events(call)

    def stats(self, timeout_s: float = LOOKUP_TIMEOUT_S) -> pb.StatsReply:
        """Counters and sizes. Raises Unavailable."""
        return self._call(self._stub.Stats, pb.StatsRequest(), timeout_s)

    def _call(self, method: Callable[..., R], request: Any, timeout_s: float) -> R:
        self._require_own()
        try:
            return method(request, timeout=max(0.0, timeout_s), metadata=metadata(traceparent()))
        except grpc.RpcError as error:
            failure = from_rpc_error(SERVICE, error)
            self._doubted |= isinstance(failure, NoAnswer)
            raise failure from error
        except ValueError as error:  # grpc's, of a channel that was closed meanwhile
            raise Unavailable(SERVICE, "its client was closed") from error

    def _carry(self, deadline: float, call: Callable[[Transport], R]) -> R:
        """Call with a transport, and if that breaks once more with a fresh connection."""
        _, transport = self._connected(deadline)
        try:
            try:
                return call(transport)
            except TimedOut as error:  # TooManyCalls is one, too
                raise to_unavailable(error) from error
            except ConnectionBroken as error:
                log.info("the %s transport to %s broke: %s", transport.name, self.address, error)
            if isinstance(transport, FramedTransport):
                transport.pool.drop_idle()
            self._doubted = True
            _, transport = self._connected(deadline)
            try:
                return call(transport)
            except ConnectionBroken as error:
                raise to_unavailable(error) from error
        except NoAnswer:
            self._doubted = True
            raise

    def _noting(
        self, answers: Iterator[tuple[VariantKey, StoredValue | Miss]]
    ) -> Iterator[tuple[VariantKey, StoredValue | Miss]]:
        try:
            yield from answers
        except NoAnswer:
            self._doubted = True
            raise

    def _connected(self, deadline: float) -> tuple[Hello, Transport]:
        """What the store said of itself and the transport to it, asked anew where in doubt."""
        self._require_own()
        hello, transport = self.hello, self._transport
        if hello is not None and transport is not None and not self._doubted:
            if time.monotonic() >= self._better_at:
                transport = self._better(hello, transport, deadline)
            return hello, transport
        left_s = deadline - time.monotonic()
        if not self._lock.acquire(timeout=max(0.0, left_s)):
            raise NoAnswer(SERVICE, f"{self.address} does not say who it is")
        try:
            if self.hello is None or self._transport is None or self._doubted:
                said = self._call(self._stub.Hello, pb.HelloRequest(), deadline - time.monotonic())
                hello = _read(lambda: from_hello(said))
                if hello != self.hello or self._transport is None:
                    if self._transport is not None:
                        self._transport.close()
                        self._transport = None
                    self._transport = self._pick(hello, deadline, self._transports)
                    self.hello = hello
                    log.info(
                        "values from %s come over the %s transport", self.address, self.transport
                    )
                self._doubted = False
            return self.hello, self._transport
        finally:
            self._lock.release()

    def _better(self, hello: Hello, transport: Transport, deadline: float) -> Transport:
        """A faster transport if one connects by now, else the same; one call at a time tries."""
        if not self._lock.acquire(blocking=False):
            return transport
        try:
            if self._transport is not transport:
                return self._transport or transport
            faster = self._transports[: self._transports.index(transport.name)]
            try:
                found = self._pick(
                    hello, min(deadline, time.monotonic() + FASTER_TRANSPORT_TIMEOUT_S), faster
                )
            except Unavailable:
                self._better_at = time.monotonic() + FASTER_TRANSPORT_EVERY_S
                return transport
            self._transport = found
            if isinstance(transport, FramedTransport):
                transport.pool.retire()
                transport.pool.drop_idle()
            log.info("values from %s come over the %s transport now", self.address, found.name)
            return found
        finally:
            self._lock.release()

    def _pick(self, hello: Hello, deadline: float, names: Sequence[str]) -> Transport:
        """The first transport that connects, each in half of the time left. Raises Unavailable."""
        reasons, refused = [], False
        self._better_at = float("inf")
        for name in names:
            transport = self._make(name, hello)
            if not isinstance(transport, FramedTransport):
                if transport is not None:
                    return transport
                reasons.append(f"{name}: not offered")
                continue
            try:
                now = time.monotonic()
                transport.pool.give(transport.pool.take(now + (deadline - now) / 2))
            except (ConnectionBroken, RagCacheError) as error:
                self._better_at = time.monotonic() + FASTER_TRANSPORT_EVERY_S
                refused |= isinstance(error, RagCacheError)
                reasons.append(f"{name}: {error}")
                log.info("no %s transport to %s: %s", name, self.address, error)
                transport.close()
            except BaseException:
                transport.close()
                raise
            else:
                return transport
        problem = f"no transport to {self.address} ({'; '.join(reasons)})"
        raise Unavailable(SERVICE, problem) if refused else NoAnswer(SERVICE, problem)

    def _make(self, name: str, hello: Hello) -> Transport | None:
        if name == "shared":
            return (
                SharedMemoryTransport(hello.data_socket, hello.boot) if hello.data_socket else None
            )
        if name == "socket":
            host = self.address.rpartition(":")[0].strip("[]")
            return TcpTransport(host, hello.data_port, hello.boot) if hello.data_port else None
        return GrpcTransport(self._channel)

    def _require_own(self) -> None:
        if os.getpid() != self._pid:
            raise Unavailable(
                SERVICE, "this client belongs to the process that forked; make another"
            )


def _events(call: Any) -> Iterator[Event]:
    try:
        for message in call:
            yield _read(partial(from_event, message))
    except grpc.RpcError as error:
        raise from_rpc_error(SERVICE, error) from error
    finally:
        call.cancel()


def _read_deletions(call: Any, idle_s: float) -> Iterator[Deletion]:
    waiting_since: list[float] = [time.monotonic()]  # empty while the caller is at work
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(idle_s / 4):
            since = next(iter(waiting_since), None)
            if since is not None and time.monotonic() > since + idle_s:
                call.cancel()

    threading.Thread(target=watch, name="store deletes", daemon=True).start()
    try:
        for message in call:
            waiting_since.clear()
            yield _read(partial(from_deletion, "deletion", message))
            waiting_since.append(time.monotonic())
    except grpc.RpcError as error:
        raise from_rpc_error(SERVICE, error) from error
    finally:
        ended.set()
        call.cancel()


def _read(read: Callable[[], R]) -> R:
    """What read gives; a reply that makes no sense is the store's mistake, not the caller's."""
    try:
        return read()
    except InvalidInput as error:
        raise RagCacheError(f"the {SERVICE} sent what makes no sense: {error}") from error
