"""Blocking client of one cache store: gRPC for control calls, the fastest transport for values.

A miss is a result. An outage raises Unavailable, or NoAnswer if the store sent nothing. The client
repeats a call only if the connection broke before the store answered, as after a restart. It never
repeats other calls, since the caller can compute the KV in that time.

Threads may share a client, but processes may not. After a fork, the child makes its own client: an
inherited one refuses every call.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import grpc

from ragcache_core.errors import InvalidInput, RagCacheError, Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.store_key import StoreKey
from ragcache_core.identity.variant import Miss, Precision
from ragcache_core.store_api import (
    MAX_KEYS,
    Ack,
    Deletion,
    DeletionBatch,
    LookupAnswer,
    LookupKey,
    NewVariant,
    PutOutcome,
    ReportedUses,
)
from ragcache_kv.transport.framed_transport import FramedTransport
from ragcache_kv.transport.framing import ConnectionBroken, TimedOut
from ragcache_kv.transport.grpc_transport import GrpcTransport
from ragcache_kv.transport.shared_memory_transport import SharedMemoryTransport
from ragcache_kv.transport.tcp_transport import TcpTransport
from ragcache_kv.transport.transport import SERVICE, Transport, ValueRequest, to_unavailable
from ragcache_kv.values.conversions import (
    checked_hello,
    from_deletion_batch,
    from_lookup_reply,
    from_miss,
    to_deletion,
    to_key,
    to_lookup_request,
    to_pull_positions,
    to_use_report,
)
from ragcache_kv.values.outgoing_value import OutgoingValue
from ragcache_kv.values.stored_value import Allocate, StoredValue
from ragcache_kv.values.tags import TaggedValue, is_authentic
from ragcache_wire.peers.credentials import NO_CREDENTIALS, Credentials
from ragcache_wire.peers.peer_channel import open_blocking_channel
from ragcache_wire.status import NoAnswer, from_rpc_error
from ragcache_wire.tracing import metadata, traceparent
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
"""All transports, the fastest first."""

FASTER_TRANSPORT_EVERY_S = 60.0
"""Time between two attempts to connect a faster transport while a slower one is in use."""

FASTER_TRANSPORT_TIMEOUT_S = 0.1
"""Time that such an attempt may add to a call."""

R = TypeVar("R")
T = TypeVar("T")


class StoreClient:
    """Client of the store at address ("host:port").

    Attributes:
        hello: The store's identity; None before the first call.
    """

    def __init__(
        self,
        address: str,
        transports: Sequence[str] = TRANSPORTS,
        credentials: Credentials = NO_CREDENTIALS,
        store_key: StoreKey | None = None,
        encodings: Sequence[Precision] = (),
    ) -> None:
        """Keep the address. The client connects at its first call.

        Args:
            address: "host:port".
            transports: The transports to try, in this order.
            credentials: With what the client proves that it belongs to the platform.
            store_key: Makes and checks the tags of values. None: they are put without one, and read
                with any.
            encodings: Precisions that the store may give to values, which are tagged in each.

        Raises:
            InvalidInput: A transport is unknown.
        """
        for name in transports:
            if name not in TRANSPORTS:
                raise InvalidInput("transports", f"has {name!r}", f"name some of {TRANSPORTS}")
        self.address = address
        self.hello: pb.HelloReply | None = None
        self._transports = tuple(transports)
        self._credentials = credentials
        self._channel = open_blocking_channel(address, credentials)
        self._store_key = store_key
        self._encodings = tuple(encodings)
        self._stub = cachestore_pb2_grpc.CacheStoreStub(self._channel)
        self._lock = threading.Lock()
        self._transport: Transport | None = None
        self._needs_check = False
        self._try_faster_at = float("inf")
        self._pid = os.getpid()

    @property
    def transport(self) -> str:
        """Name of the transport in use; "" before the first call."""
        return "" if self._transport is None else self._transport.name

    def close(self) -> None:
        """Close every connection and end running calls."""
        if os.getpid() != self._pid:
            return
        if self._transport is not None:
            self._transport.close()
        self._channel.close()

    def connect(self, timeout_s: float = LOOKUP_TIMEOUT_S) -> None:
        """Connect and choose a transport now. Raises Unavailable."""
        self._connected(time.monotonic() + timeout_s)

    def lookup(
        self,
        keys: Sequence[LookupKey],
        timeout_s: float = LOOKUP_TIMEOUT_S,
        exact: bool = False,
        domain: str = "",
        lossy: bool = False,
    ) -> LookupAnswer:
        """Return what the store has of keys, without values. Raises Unavailable.

        Args:
            keys: What to look for.
            timeout_s: Time for the answer.
            exact: Whether to find only variants that equal a full computation.
            domain: Find only variants of this domain; "" for any.
            lossy: Whether the caller may use values of lossy precision. It finds them in any case.
        """
        deadline = time.monotonic() + timeout_s
        hello, _ = self._connected(deadline)
        answers = []
        for part in _calls(keys) or [keys]:
            request = to_lookup_request(part, exact, domain, lossy=lossy)
            reply = self._call(self._stub.Lookup, request, deadline - time.monotonic())
            answers.append(checked_reply(partial(from_lookup_reply, reply, hello.store)))
        # The first call has seen the fewest deletes.
        return replace(answers[0], variants=tuple(one for part in answers for one in part.variants))

    def get(
        self,
        keys: Sequence[VariantKey],
        timeout_s: float,
        exact: bool = False,
        domain: str = "",
        allocate: Allocate | None = None,
        fix_overheads: Mapping[VariantKey, float] | None = None,
    ) -> Iterator[tuple[VariantKey, StoredValue | Miss]]:
        """Send the request now, and return the values in the order of keys.

        The iterator returns each value when it is complete and verified. A value that does not
        match its checksums is Miss.CORRUPT, and the client reports it to the store. One whose tag
        was not made with the platform's key is Miss.FORGED, and the client deletes it. A caller
        that stops early ends the call.

        Args:
            keys: The variants.
            timeout_s: Time for all values.
            exact: Whether to read only variants that equal a full computation.
            domain: Read only variants of this domain; "" for any.
            allocate: Returns the memory of a value; None for new memory. It is called in any order
                of the keys, and again if a value has another size than before.
            fix_overheads: Cache-Craft's CFO of the use of each key; 0 for a key that it lacks.

        Raises:
            Unavailable: The store stopped, or the time ended before the last value.
        """
        keys = list(keys)
        if not keys:
            return iter(())
        deadline = time.monotonic() + timeout_s
        request = ValueRequest(
            keys, deadline, exact, domain, allocate, traceparent(), fix_overheads or {}
        )
        answers = self._carry(request.deadline, lambda transport: transport.get(request))
        return self._checked(self._noting(zip(keys, answers, strict=True)))

    def put(
        self, variant: NewVariant, value: OutgoingValue, timeout_s: float, ack: Ack = Ack.ACCEPTED
    ) -> PutOutcome:
        """Store a value. Each part goes out as soon as it is ready.

        Raises:
            Unavailable: The store does not answer in time.
            InvalidInput: The value does not match its variant.
            IncompleteValue: The value was not completed in time.
        """
        deadline = time.monotonic() + timeout_s
        if self._store_key is not None:
            value = TaggedValue(self._store_key, variant, value, self._encodings)
        return self._carry(deadline, lambda transport: transport.put(variant, value, ack, deadline))

    def find_misses(
        self, keys: Sequence[VariantKey], timeout_s: float = LOOKUP_TIMEOUT_S
    ) -> Sequence[Miss | None]:
        """Return why each variant is not stored; None if it is, or is being put.

        This counts no misses.

        Raises:
            Unavailable: The store does not answer in time.
        """
        request = pb.FindMissesRequest(keys=map(to_key, keys))
        reply = self._call(self._stub.FindMisses, request, timeout_s)
        if len(reply.misses) != len(keys):
            raise RagCacheError(f"the {SERVICE} answered {len(reply.misses)} of {len(keys)} keys")
        return [from_miss(miss) for miss in reply.misses]

    def report_uses(
        self, reports: Sequence[ReportedUses], timeout_s: float = LOOKUP_TIMEOUT_S
    ) -> int:
        """Report uses that needed no read, so that the variants stay hot in the store.

        Returns:
            How many uses the store counted: those of variants that it has.

        Raises:
            Unavailable: The store does not answer in time.
        """
        parts = _calls(reports)
        calls = (self._call(self._stub.ReportUses, to_use_report(one), timeout_s) for one in parts)
        return sum(reply.counted for reply in calls)

    def prefetch(
        self,
        keys: Sequence[VariantKey],
        timeout_s: float = LOOKUP_TIMEOUT_S,
        *,
        hold_s: float = 0.0,
    ) -> int:
        """Bring values from disk into memory, in the background.

        Args:
            keys: The variants.
            timeout_s: Of the call.
            hold_s: Time for which the store does not evict them, within its bounds.

        Returns:
            The number of values for which that started.
        """
        started = 0
        for part in _calls(keys):
            request = pb.PrefetchRequest(keys=map(to_key, part), hold_ms=round(1e3 * hold_s))
            started += self._call(self._stub.Prefetch, request, timeout_s).started
        return started

    def delete(self, deletion: Deletion, timeout_s: float = DELETE_TIMEOUT_S) -> int:
        """Delete durably. Return the number of removed variants."""
        request = pb.DeleteRequest(deletion=to_deletion(deletion))
        return self._call(self._stub.Delete, request, timeout_s).removed

    def tombstones(
        self, pulled: Mapping[bytes, int], idle_s: float = DELETE_TIMEOUT_S
    ) -> Generator[DeletionBatch, None, None]:
        """Return the deletes that the store has applied and the caller has not pulled, in order.

        There is at least one batch. A caller that stops early ends the call.

        Args:
            pulled: By store id, the sequence of the last batch that the caller has applied.
            idle_s: Time that the next batch may take. There may be many.

        Raises:
            Unavailable: The store does not answer in time.
        """
        self._require_own()
        request = pb.TombstonesRequest(pulled=to_pull_positions(pulled))
        call: Any = self._stub.Tombstones(request, metadata=metadata(traceparent()))
        return _read_deletions(call, idle_s)

    def drop_copy(self, key: VariantKey, timeout_s: float = LOOKUP_TIMEOUT_S) -> bool:
        """Have a shard drop its copy of a variant of another shard. Return whether it had one."""
        request = pb.DropCopyRequest(key=to_key(key))
        return self._call(self._stub.DropCopy, request, timeout_s).dropped

    def stats(self, timeout_s: float = LOOKUP_TIMEOUT_S) -> pb.StatsReply:
        """Return counters and sizes. Raises Unavailable."""
        return self._call(self._stub.Stats, pb.StatsRequest(), timeout_s)

    def _call(self, method: Callable[..., R], request: Any, timeout_s: float) -> R:
        self._require_own()
        try:
            return method(request, timeout=max(0.0, timeout_s), metadata=metadata(traceparent()))
        except grpc.RpcError as error:
            failure = from_rpc_error(SERVICE, error)
            self._needs_check |= isinstance(failure, NoAnswer)
            raise failure from error
        except ValueError as error:  # gRPC raises it for a closed channel
            raise Unavailable(SERVICE, "the client is closed") from error

    def _carry(self, deadline: float, call: Callable[[Transport], R]) -> R:
        """Make a call. If its connection breaks, repeat it once on a new connection."""
        _, transport = self._connected(deadline)
        try:
            try:
                return call(transport)
            except TimedOut as error:  # also TooManyCalls
                raise to_unavailable(error) from error
            except ConnectionBroken as error:
                log.info(
                    "store client: connection broken address=%s transport=%s error=%s",
                    self.address,
                    transport.name,
                    error,
                )
            if isinstance(transport, FramedTransport):
                transport.pool.drop_idle()
            self._needs_check = True
            _, transport = self._connected(deadline)
            try:
                return call(transport)
            except ConnectionBroken as error:
                raise to_unavailable(error) from error
        except NoAnswer:
            self._needs_check = True
            raise

    def _checked(
        self, answers: Iterator[tuple[VariantKey, StoredValue | Miss]]
    ) -> Iterator[tuple[VariantKey, StoredValue | Miss]]:
        """Check the tag of each value in the caller's memory, which the store cannot change."""
        for key, answer in answers:
            if (
                self._store_key is None
                or isinstance(answer, Miss)
                or is_authentic(self._store_key, key, answer)
            ):
                yield key, answer
                continue
            log.error(
                "store client: value is forged address=%s variant=%s",
                self.address,
                key.to_bytes().hex(),
            )
            # Its checksums hold, so the store would keep it, and refuse the right value.
            with suppress(RagCacheError):
                self.delete(Deletion(os.urandom(16), variants=(key,)), LOOKUP_TIMEOUT_S)
            yield key, Miss.FORGED

    def _noting(
        self, answers: Iterator[tuple[VariantKey, StoredValue | Miss]]
    ) -> Iterator[tuple[VariantKey, StoredValue | Miss]]:
        try:
            yield from answers
        except NoAnswer:
            self._needs_check = True
            raise

    def _connected(self, deadline: float) -> tuple[pb.HelloReply, Transport]:
        """Return the store's identity and the transport to it. Connect if necessary."""
        self._require_own()
        hello, transport = self.hello, self._transport
        if hello is not None and transport is not None and not self._needs_check:
            if time.monotonic() >= self._try_faster_at:
                transport = self._try_faster(hello, transport, deadline)
            return hello, transport
        left_s = deadline - time.monotonic()
        if not self._lock.acquire(timeout=max(0.0, left_s)):
            raise NoAnswer(SERVICE, f"{self.address} did not answer Hello in time")
        try:
            if self.hello is None or self._transport is None or self._needs_check:
                reply = self._call(self._stub.Hello, pb.HelloRequest(), deadline - time.monotonic())
                hello = checked_reply(lambda: checked_hello(reply))
                if hello != self.hello or self._transport is None:
                    if self._transport is not None:
                        self._transport.close()
                        self._transport = None
                    self._transport = self._choose(hello, deadline, self._transports)
                    self.hello = hello
                    log.info(
                        "store client: connected address=%s transport=%s",
                        self.address,
                        self.transport,
                    )
                self._needs_check = False
            return self.hello, self._transport
        finally:
            self._lock.release()

    def _try_faster(self, hello: pb.HelloReply, transport: Transport, deadline: float) -> Transport:
        """Return a faster transport if one connects now, else the same."""
        if not self._lock.acquire(blocking=False):
            return transport
        try:
            if self._transport is not transport:
                return self._transport or transport
            faster = self._transports[: self._transports.index(transport.name)]
            try:
                chosen = self._choose(
                    hello, min(deadline, time.monotonic() + FASTER_TRANSPORT_TIMEOUT_S), faster
                )
            except Unavailable:
                self._try_faster_at = time.monotonic() + FASTER_TRANSPORT_EVERY_S
                return transport
            self._transport = chosen
            if isinstance(transport, FramedTransport):
                transport.pool.retire()
                transport.pool.drop_idle()
            log.info(
                "store client: changed transport address=%s transport=%s",
                self.address,
                chosen.name,
            )
            return chosen
        finally:
            self._lock.release()

    def _choose(self, hello: pb.HelloReply, deadline: float, names: Sequence[str]) -> Transport:
        """Return the first transport that connects. Each one has half of the time left.

        Raises Unavailable.
        """
        reasons, refused = [], False
        self._try_faster_at = float("inf")
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
                self._try_faster_at = time.monotonic() + FASTER_TRANSPORT_EVERY_S
                refused |= isinstance(error, RagCacheError)
                reasons.append(f"{name}: {error}")
                log.info(
                    "store client: connect failed address=%s transport=%s error=%s",
                    self.address,
                    name,
                    error,
                )
                transport.close()
            except BaseException:
                transport.close()
                raise
            else:
                return transport
        problem = f"no transport to {self.address} ({'; '.join(reasons)})"
        raise Unavailable(SERVICE, problem) if refused else NoAnswer(SERVICE, problem)

    def _make(self, name: str, hello: pb.HelloReply) -> Transport | None:
        if name == "shared":
            path = hello.data_socket
            # A shard names its socket to clients of other machines and pods, too.
            is_here = bool(path) and os.path.exists(path)
            return SharedMemoryTransport(path, hello.boot, self._credentials) if is_here else None
        if name == "socket":
            host = self.address.rpartition(":")[0].strip("[]")
            port = hello.data_port
            return TcpTransport((host, port), hello.boot, self._credentials) if port else None
        return GrpcTransport(self._channel)

    def _require_own(self) -> None:
        if os.getpid() != self._pid:
            raise Unavailable(SERVICE, "the client belongs to the parent process; make a new one")


def _calls(keys: Sequence[T]) -> list[Sequence[T]]:
    """Return keys in parts that one call takes each."""
    return [keys[start : start + MAX_KEYS] for start in range(0, len(keys), MAX_KEYS)]


def _read_deletions(call: Any, idle_s: float) -> Generator[DeletionBatch, None, None]:
    waiting_since: list[float] = [time.monotonic()]  # empty while the caller works
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
            yield checked_reply(partial(from_deletion_batch, message))
            waiting_since.append(time.monotonic())
    except grpc.RpcError as error:
        raise from_rpc_error(SERVICE, error) from error
    finally:
        ended.set()
        call.cancel()


def checked_reply(read: Callable[[], R]) -> R:
    """Return the result of read. An invalid reply is the store's error, not the caller's."""
    try:
        return read()
    except InvalidInput as error:
        raise RagCacheError(f"the {SERVICE} sent an invalid message: {error}") from error
