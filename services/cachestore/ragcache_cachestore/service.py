"""The gRPC face of the store: decode and check, call, encode.

Whatever may wait (for room, for the disk) or takes long runs in threads, so that the event loop
never stands still. Values pass in pieces: a call holds a piece or two, never a whole value.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ragcache_cachestore.arrival import Arrival
from ragcache_cachestore.checksums import Check
from ragcache_cachestore.leases import Lease
from ragcache_cachestore.replication import Replication
from ragcache_cachestore.store import Store
from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_core.extents import Extent
from ragcache_core.storing import Ack, Event, EventKind, Hello, NewVariant, PutOutcome
from ragcache_core.variant import Miss
from ragcache_kv.store.messages import (
    from_deletion,
    from_get_request,
    from_key,
    from_keys,
    from_lookup_request,
    from_pin_seconds,
    from_put_header,
    to_deletion,
    to_event,
    to_hello,
    to_lookup_reply,
    to_miss_header,
    to_outcome,
    to_value_header,
)
from ragcache_wire.channel import PART_BYTES
from ragcache_wire.v1 import cachestore_pb2 as pb
from ragcache_wire.value_part import data_of, encode_data

SERVICE = pb.DESCRIPTOR.services_by_name["CacheStore"].full_name
LANE = "grpc"

VALUE_THREADS = 16
"""For puts, which may wait for room or for the disk, and reads of the disk."""
CONTROL_THREADS = 4
MAX_GETS = 32
"""Gets that send at once; further ones wait their turn. Each holds two pieces or so."""
MAX_PUTS = 64
MAX_WATCHERS = 64
INLINE_KEYS = 64
"""Up to so many keys are answered in the event loop itself, in less time than a thread takes."""

Context = grpc.aio.ServicerContext[Any, Any]
R = TypeVar("R")


class CacheStoreService:
    """ragcache.v1.CacheStore over a store.

    hello: what Hello says. replication: None for the only shard.
    """

    def __init__(
        self,
        store: Store,
        hello: Hello,
        replication: Replication | None = None,
    ) -> None:
        self._store = store
        self._hello_reply = to_hello(hello)
        self._replication = replication
        self._values = ThreadPoolExecutor(VALUE_THREADS, thread_name_prefix="values")
        self._control = ThreadPoolExecutor(CONTROL_THREADS, thread_name_prefix="control")
        self._gets = asyncio.Semaphore(MAX_GETS)
        self._puts = asyncio.Semaphore(MAX_PUTS)
        self._watchers: set[asyncio.Event] = set()
        self._closed = False

    def register(self, server: grpc.aio.Server) -> None:
        """Serve on server. As generated code would, but values pass as encoded messages."""
        unary, stream = (
            grpc.unary_unary_rpc_method_handler,
            grpc.unary_stream_rpc_method_handler,
        )
        handlers = {
            "Hello": unary(
                self._hello, pb.HelloRequest.FromString, pb.HelloReply.SerializeToString
            ),
            "Lookup": unary(
                self._lookup, pb.LookupRequest.FromString, pb.LookupReply.SerializeToString
            ),
            "Put": grpc.stream_unary_rpc_method_handler(
                self._put, None, pb.PutReply.SerializeToString
            ),
            "Get": stream(self._get, pb.GetRequest.FromString),
            "Prefetch": unary(
                self._prefetch, pb.PrefetchRequest.FromString, pb.PrefetchReply.SerializeToString
            ),
            "Pin": unary(self._pin, pb.PinRequest.FromString, pb.PinReply.SerializeToString),
            "Unpin": unary(
                self._unpin, pb.UnpinRequest.FromString, pb.UnpinReply.SerializeToString
            ),
            "Delete": unary(
                self._delete, pb.DeleteRequest.FromString, pb.DeleteReply.SerializeToString
            ),
            "Tombstones": stream(
                self._tombstones, pb.TombstonesRequest.FromString, pb.Deletion.SerializeToString
            ),
            "ChangeReplica": unary(
                self._change_replica,
                pb.ChangeReplicaRequest.FromString,
                pb.ChangeReplicaReply.SerializeToString,
            ),
            "Watch": stream(self._watch, pb.WatchRequest.FromString, pb.Event.SerializeToString),
            "Stats": unary(
                self._stats, pb.StatsRequest.FromString, pb.StatsReply.SerializeToString
            ),
        }
        generic = grpc.method_handlers_generic_handler(SERVICE, handlers)
        server.add_generic_rpc_handlers((generic,))

    def end_watches(self) -> None:
        """End the calls that would never end, so that the server can stop."""
        self._closed = True
        for wake in self._watchers:
            wake.set()

    def close(self) -> None:
        """End its threads; no call may be running or come any more."""
        self._values.shutdown()
        self._control.shutdown()

    async def _hello(self, request: pb.HelloRequest, context: Context) -> pb.HelloReply:
        """Who this is, and which lanes it offers."""
        return self._hello_reply

    async def _lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupReply:
        """What is stored, without values."""

        def look() -> pb.LookupReply:
            wants, exact, domain = from_lookup_request(request)
            return to_lookup_reply(self._store.lookup(wants, exact, domain), 0)

        with self._span("Lookup", context):
            if len(request.wants) <= INLINE_KEYS:
                return look()
            return await self._run(self._control, look)

    async def _put(self, request_iterator: AsyncIterator[bytes], context: Context) -> pb.PutReply:
        """Store one value. The messages are encoded PutParts (value_part)."""
        _require_deadline(context)
        began = time.monotonic()
        with self._span("Put", context):
            async with self._puts:
                new, ack, outcome = await self._receive(request_iterator, context)
        seconds = time.monotonic() - began
        self._store.note_put(outcome, ack, LANE, new.info.num_bytes, seconds)
        return pb.PutReply(outcome=to_outcome(outcome))

    async def _receive(
        self, request_iterator: AsyncIterator[bytes], context: Context
    ) -> tuple[NewVariant, Ack, PutOutcome]:
        messages = aiter(request_iterator)
        first = _part(await anext(messages, b""))
        if first.WhichOneof("part") != "header":
            raise InvalidInput("header", "is missing", "send it as the first message")
        new, ack = from_put_header("header", first.header, self._store.max_value_bytes)
        arrival = await self._begin(new, ack, _remaining_s(context))
        if isinstance(arrival, PutOutcome):
            return new, ack, arrival
        try:
            await _fill(arrival, messages)
        except BaseException:
            arrival.abort()
            raise
        # Once begun, it ends by itself, whether or not anybody still waits.
        commit = asyncio.get_running_loop().run_in_executor(
            self._values, arrival.commit, ack, _remaining_s(context)
        )
        return new, ack, await asyncio.shield(commit)

    async def _begin(self, new: NewVariant, ack: Ack, timeout_s: float) -> Arrival | PutOutcome:
        loop = asyncio.get_running_loop()
        begun = loop.run_in_executor(self._values, self._store.begin_put, new, ack, timeout_s)
        try:
            return await asyncio.shield(begun)
        except asyncio.CancelledError:
            begun.add_done_callback(_abort_late)
            raise

    async def _get(self, request: pb.GetRequest, context: Context) -> AsyncIterator[bytes]:
        """Stream values as encoded GetParts."""
        _require_deadline(context)
        keys, exact, domain = from_get_request(request)
        async with self._gets:
            for index, key in enumerate(keys):
                began = time.monotonic()
                (lease,) = self._store.open([key], exact, domain)
                if isinstance(lease, Miss):
                    header = to_miss_header(index, lease)
                    yield pb.GetPart(header=header).SerializeToString()
                    continue
                check = Check(lease.parts)
                try:
                    yield pb.GetPart(header=_header(index, lease)).SerializeToString()
                    for extent in _pieces(lease.extents):
                        piece = await self._piece(lease, extent, check)
                        if not self._store.is_leased(lease.id):
                            raise Unavailable(
                                "cachestore", "the value was read too slowly to be kept in place"
                            )
                        yield piece
                finally:
                    if check.wrong is None:
                        self._store.release([lease.id])
                    else:  # the caller sees it, too, but on this lane has nobody to tell
                        self._values.submit(self._store.release, [lease.id], [lease.id])
                seconds = time.monotonic() - began
                self._store.note_sent(lease.tier, LANE, lease.info.num_bytes, seconds)

    async def _piece(self, lease: Lease, extent: Extent, check: Check) -> bytes:
        """An encoded GetPart with the bytes of a short extent of a leased value."""
        if not lease.on_disk:
            (view,) = self._store.arena.views([extent])
            check.add(view)
            return encode_data(view)

        def read() -> bytes:
            piece = memoryview(bytearray(extent.num_bytes))
            # What a disk does not give is found out by the checksums.
            self._store.value_file.read_into([extent], [piece])
            check.add(piece)
            return encode_data(piece)

        return await self._run(self._values, read)

    async def _prefetch(self, request: pb.PrefetchRequest, context: Context) -> pb.PrefetchReply:
        """Bring values from disk into memory, in the background."""
        return pb.PrefetchReply(started=self._store.prefetch(from_keys("keys", request.keys)))

    async def _pin(self, request: pb.PinRequest, context: Context) -> pb.PinReply:
        """Keep values from eviction for some time."""
        keys = from_keys("keys", request.keys)
        seconds = from_pin_seconds("seconds", request.seconds)
        return pb.PinReply(pinned=self._store.pin(keys, seconds))

    async def _unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinReply:
        """End pins."""
        return pb.UnpinReply(unpinned=self._store.unpin(from_keys("keys", request.keys)))

    async def _delete(self, request: pb.DeleteRequest, context: Context) -> pb.DeleteReply:
        """Remove variants; gone from every later read, and for good, when the reply comes."""
        deletion = from_deletion("deletion", request.deletion)
        with self._span("Delete", context):
            removed = await self._run(self._control, lambda: self._store.delete(deletion))
        return pb.DeleteReply(removed=removed)

    async def _tombstones(
        self, request: pb.TombstonesRequest, context: Context
    ) -> AsyncIterator[pb.Deletion]:
        """Deletes that are remembered, in the order in which they were applied here."""
        for deletion in self._store.tombstones_since(request.since_ms):
            yield to_deletion(deletion)

    async def _change_replica(
        self, request: pb.ChangeReplicaRequest, context: Context
    ) -> pb.ChangeReplicaReply:
        """Make or drop a copy on another shard."""
        key = from_key("key", request.key)
        host, _, port = request.shard.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise InvalidInput("shard", f"is {request.shard!r}", "send host:port of a shard")
        replication = self._replication
        if replication is None:
            return pb.ChangeReplicaReply(changed=False)
        return pb.ChangeReplicaReply(
            changed=await self._run(
                self._control, lambda: replication.change(key, request.shard, drop=request.drop)
            )
        )

    async def _watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.Event]:
        """Events as they happen, after those missed or a snapshot."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise Unavailable("cachestore", f"{MAX_WATCHERS} watch it already")
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:  # within the store's lock: at once
            if not changed.is_set():
                with contextlib.suppress(RuntimeError):  # the loop has ended, and this with it
                    loop.call_soon_threadsafe(changed.set)

        self._store.watch(wake)
        self._watchers.add(changed)
        try:
            after = request.after if request.boot == self._store.boot else None
            while not self._closed:
                changed.clear()
                missed = None if after is None else self._store.events_after(after)
                if missed is None:
                    sequence, snapshot = await self._run(self._control, self._store.snapshot)
                    for event in _snapshot(self._store.boot, sequence, snapshot):
                        yield to_event(event)
                    after = sequence
                    continue
                for event in missed:
                    yield to_event(event)
                    after = event.sequence
                if not missed:
                    await changed.wait()
        finally:
            self._watchers.discard(changed)
            self._store.unwatch(wake)

    async def _stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsReply:
        """Sizes now, and what happened since the start."""
        stats = await self._run(self._control, self._store.stats)
        return pb.StatsReply(
            variants=stats.variants,
            disk_bytes=stats.disk_bytes,
            disk_capacity_bytes=stats.disk_capacity_bytes,
            memory_bytes=stats.memory_bytes,
            memory_capacity_bytes=stats.memory_capacity_bytes,
            hits_memory=stats.hits_memory,
            hits_disk=stats.hits_disk,
            misses=stats.misses,
            misses_by_reason=stats.misses_by_reason,
            corrupt=stats.corrupt,
            puts=stats.puts,
            evictions={tier.value: count for tier, count in stats.evictions.items()},
            bytes_by_precision=stats.bytes_by_precision,
            bytes_by_lane=stats.bytes_by_lane,
            leases=stats.leases,
            tombstones=stats.tombstones,
            score_histogram=stats.score_histogram,
        )

    async def _run(self, pool: ThreadPoolExecutor, act: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(pool, act)

    def _span(self, name: str, context: Context) -> Any:
        return self._store.telemetry.span(name, context.invocation_metadata() or ())


async def _fill(arrival: Arrival, messages: AsyncIterator[bytes]) -> None:
    """Write the data of messages to where the value is to lie. Raises InvalidInput."""
    num_bytes = arrival.new.info.num_bytes
    views, received = arrival.views, 0
    async for message in messages:
        data = _data(message)
        received += len(data)
        if received > num_bytes:
            raise InvalidInput(
                "data",
                f"is longer than the {num_bytes} bytes announced",
                "send as many bytes as header.info.num_bytes says",
            )
        while data:
            taken = min(len(views[0]), len(data))
            views[0][:taken] = data[:taken]
            views[0], data = views[0][taken:], data[taken:]
            if not views[0]:
                del views[0]
    if received < num_bytes:
        raise InvalidInput(
            "data",
            f"has {received} of the {num_bytes} bytes announced",
            "send as many bytes as header.info.num_bytes says",
        )


def _abort_late(begun: asyncio.Future[Arrival | PutOutcome]) -> None:
    """Nobody waits any more for the room that was made."""
    if not begun.cancelled() and begun.exception() is None:
        arrival = begun.result()
        if isinstance(arrival, Arrival):
            arrival.abort()


def _pieces(extents: Sequence[Extent]) -> Iterator[Extent]:
    """Extents cut into pieces of a message each."""
    for extent in extents:
        for offset in range(0, extent.num_bytes, PART_BYTES):
            yield Extent(extent.offset + offset, min(PART_BYTES, extent.num_bytes - offset))


def _snapshot(boot: bytes, sequence: int, stored: Sequence[Event]) -> Iterator[Event]:
    """A snapshot as of the event of sequence."""
    yield Event(boot, sequence, EventKind.SNAPSHOT_BEGIN)
    for event in stored:
        yield replace(event, sequence=sequence)
    yield Event(boot, sequence, EventKind.SNAPSHOT_END)


def _header(index: int, lease: Lease) -> pb.GetHeader:
    return to_value_header(
        index, lease.info, lease.parts, lease.shape, lease.value_format, lease.tier
    )


def _remaining_s(context: Context) -> float:
    return max(0.0, context.time_remaining() or 0.0)


def _require_deadline(context: Context) -> None:
    # Values in transit hold memory; without an end to the call a stuck peer would hold it for good.
    if context.time_remaining() is None:
        raise InvalidInput("deadline", "is missing", "give calls that carry values a deadline")


def _data(message: bytes) -> memoryview:
    """The data of an encoded PutPart."""
    if (data := data_of(message)) is not None:
        return data
    part = _part(message)
    if part.WhichOneof("part") != "data":
        raise InvalidInput("header", "came twice", "send it once, then data only")
    return memoryview(part.data)


def _part(message: bytes) -> pb.PutPart:
    try:
        return pb.PutPart.FromString(message)
    except DecodeError as error:
        raise InvalidInput("message", "is no PutPart", "send what the proto says") from error
