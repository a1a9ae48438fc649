"""The gRPC face of the store: decode and check, call, encode.

Whatever may wait (for room, for the disk) or takes long runs in threads, so that the event loop
never stands still. Values pass in pieces: a call holds a piece or two, never a whole value.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ragcache_cachestore.cluster.replicator import Replicator
from ragcache_cachestore.incoming_put import COMMIT_TIMEOUT_S, IncomingPut
from ragcache_cachestore.state.leases import ReadLease
from ragcache_cachestore.storage.checksums import PartChecksums
from ragcache_cachestore.store import Store
from ragcache_cachestore.telemetry.exporter import count_hit, count_miss
from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_core.identity.variant import Miss
from ragcache_core.storage.extents import Extent
from ragcache_core.store_api import (
    LEASE_S,
    Ack,
    Event,
    EventKind,
    Hello,
    NewVariant,
    PutCompletion,
    PutOutcome,
)
from ragcache_kv.values.conversions import (
    from_completion,
    from_deletion,
    from_get_request,
    from_key,
    from_keys,
    from_lookup_request,
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
from ragcache_wire.tracing import Attribute, Span
from ragcache_wire.v1 import cachestore_pb2 as pb
from ragcache_wire.value_part import data_of, encode_data

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["CacheStore"].full_name
LANE = "grpc"

PUT_THREADS = 16
"""For puts, which may wait for room or for the disk."""
READ_THREADS = 8
"""For reads of the disk, which wait for no put."""
CONTROL_THREADS = 4
SLOW_THREADS = 2
"""For what takes long and nobody hurries for, so that no delete waits for it."""
CLOSE_S = 5.0
RETRY_AFTER_S = 1.0
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

    hello: what Hello says. replication: None for the only shard. gated: until ``open`` it only
    says and hears what was deleted, for shards that start at the same time; nobody gets a value.
    """

    def __init__(
        self,
        store: Store,
        hello: Hello,
        replication: Replicator | None = None,
        *,
        gated: bool = False,
    ) -> None:
        self._store = store
        self._hello_reply = to_hello(hello)
        self._replication = replication
        self._gated = gated
        self._writes = ThreadPoolExecutor(PUT_THREADS, thread_name_prefix="puts")
        self._reads = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="reads")
        self._control = ThreadPoolExecutor(CONTROL_THREADS, thread_name_prefix="control")
        self._slow = ThreadPoolExecutor(SLOW_THREADS, thread_name_prefix="slow")
        self._gets = asyncio.Semaphore(MAX_GETS)
        self._puts = asyncio.Semaphore(MAX_PUTS)
        self._watchers: set[asyncio.Event] = set()
        self._busy = 0
        self._busy_lock = threading.Lock()
        self._closed = False

    def register(self, server: grpc.aio.Server) -> None:
        """Serve on server. As generated code would, but values pass as encoded messages."""
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_client_gone)
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

    def open(self) -> None:
        """Answer every call from now on."""
        self._gated = False

    def _require_open(self) -> None:
        if self._gated:
            raise Unavailable(
                "cachestore", "it is asking the other shards what was deleted", RETRY_AFTER_S
            )

    def end_watches(self) -> None:
        """End the calls that would never end, so that the server can stop."""
        self._closed = True
        for wake in self._watchers:
            wake.set()

    def close(self) -> None:
        """End its threads; no call may come any more.

        One that a disk holds up is left behind after CLOSE_S; the store's end ends it.
        """
        deadline = time.monotonic() + CLOSE_S
        for pool in (self._writes, self._reads, self._control, self._slow):
            pool.shutdown(wait=False, cancel_futures=True)
        while time.monotonic() < deadline and self._busy:
            time.sleep(0.01)
        if self._busy:
            log.warning("%d calls are left behind: the disk holds them up", self._busy)

    async def _hello(self, request: pb.HelloRequest, context: Context) -> pb.HelloReply:
        """Who this is, and which transports it offers."""
        self._require_open()  # whoever asks wants values next
        return self._hello_reply

    async def _lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupReply:
        """What is stored, without values."""
        self._require_open()

        def look() -> pb.LookupReply:
            wants, exact, domain = from_lookup_request(request)
            return to_lookup_reply(self._store.lookup(wants, exact, domain), 0)

        with self._span("Lookup", context, keys=len(request.keys)):
            if len(request.keys) <= INLINE_KEYS:
                return look()
            return await self._in(self._control, look)

    async def _put(self, request_iterator: AsyncIterator[bytes], context: Context) -> pb.PutReply:
        """Store one value. The messages are encoded PutParts (value_part)."""
        self._require_open()
        _require_deadline(context)
        began = time.monotonic()
        with self._span("Put", context, transport=LANE) as span:
            async with self._puts:
                new, ack, outcome = await self._receive(request_iterator, context)
            span.set(bytes=new.info.num_bytes, ack=ack.value, outcome=outcome.value)
        seconds = time.monotonic() - began
        self._store.note_put(outcome, ack, LANE, new.info.num_bytes, seconds)
        return pb.PutReply(outcome=to_outcome(outcome))

    async def _receive(
        self, request_iterator: AsyncIterator[bytes], context: Context
    ) -> tuple[NewVariant, Ack, PutOutcome]:
        messages = aiter(request_iterator)
        async with _slowness(context):
            first = _part(await anext(messages, b""))
        if first.WhichOneof("part") != "header":
            raise InvalidInput("header", "is missing", "send it as the first message")
        new, ack = from_put_header("header", first.header, self._store.max_value_bytes)
        incoming = await self._begin(new, ack, _remaining_s(context, COMMIT_TIMEOUT_S))
        if isinstance(incoming, PutOutcome):
            return new, ack, incoming
        try:
            async with _slowness(context):
                completion = await _fill(incoming, messages)
        except BaseException:
            incoming.abort()
            raise
        # Once begun, it ends by itself, whether or not anybody still waits.
        timeout_s = _remaining_s(context, COMMIT_TIMEOUT_S)
        commit = self._in(self._writes, lambda: incoming.commit(completion, ack, timeout_s))
        return new, ack, await asyncio.shield(commit)

    async def _begin(self, new: NewVariant, ack: Ack, timeout_s: float) -> IncomingPut | PutOutcome:
        begun = self._in(self._writes, lambda: self._store.begin_put(new, ack, timeout_s))
        try:
            return await asyncio.shield(begun)
        except asyncio.CancelledError:
            begun.add_done_callback(_abort_late)
            raise

    async def _get(self, request: pb.GetRequest, context: Context) -> AsyncIterator[bytes]:
        """Stream values as encoded GetParts.

        A reader that takes longer for a value than a lease lasts gives its turn to others.
        """
        self._require_open()
        _require_deadline(context)
        with self._span("Get", context, transport=LANE, keys=len(request.keys)) as span:
            keys, exact, domain = from_get_request(request)
            async with _Turn(self._gets) as turn:
                for index, key in enumerate(keys):
                    began = time.monotonic()
                    turn.ends_in(LEASE_S)
                    (lease,) = opened = self._store.open([key], exact, domain)
                    self._store.note_opened(opened)
                    if isinstance(lease, Miss):
                        count_miss(span, lease)
                        header = to_miss_header(index, lease)
                        yield pb.GetPart(header=header).SerializeToString()
                        continue
                    sums = PartChecksums([part.num_bytes for part in lease.parts])
                    try:
                        yield pb.GetPart(header=_header(index, lease)).SerializeToString()
                        for extent in _pieces(lease.extents):
                            piece = await self._piece(lease, extent, sums)
                            if turn.over or not self._store.is_leased(lease.id):
                                raise Unavailable(
                                    "cachestore",
                                    "the value was read too slowly to be kept in place",
                                )
                            yield piece
                    finally:
                        if sums.first_mismatch([part.checksum for part in lease.parts]) is None:
                            self._store.release([lease.id])
                        else:  # the caller sees it, too, but on this transport has nobody to tell
                            release = partial(self._store.release, [lease.id], [lease.id])
                            self._in(self._reads, release).add_done_callback(_log_failure)
                    seconds = time.monotonic() - began
                    self._store.note_sent(lease.tier, LANE, lease.info.num_bytes, seconds)
                    count_hit(span, lease.tier, lease.info.num_bytes)

    async def _piece(self, lease: ReadLease, extent: Extent, sums: PartChecksums) -> bytes:
        """An encoded GetPart with the bytes of a short extent of a leased value."""
        if not lease.on_disk:
            (view,) = self._store.memory_tier.views([extent])
            sums.add(view)
            return encode_data(view)

        def read() -> bytes:
            piece = memoryview(bytearray(extent.num_bytes))
            # What a disk does not give is found out by the checksums.
            self._store.disk_tier.read_into([extent], [piece])
            sums.add(piece)
            return encode_data(piece)

        return await self._in(self._reads, read)

    async def _prefetch(self, request: pb.PrefetchRequest, context: Context) -> pb.PrefetchReply:
        """Bring values from disk into memory, in the background."""
        self._require_open()
        with self._span("Prefetch", context, keys=len(request.keys)):
            started = self._store.prefetch(from_keys("keys", request.keys))
        return pb.PrefetchReply(started=started)

    async def _delete(self, request: pb.DeleteRequest, context: Context) -> pb.DeleteReply:
        """Remove variants; gone from every later read, and for good, when the reply comes."""
        deletion = from_deletion("deletion", request.deletion)
        _require_deadline(context)
        with self._span("Delete", context):
            removed = await self._in(self._control, lambda: self._store.delete(deletion))
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
        self._require_open()
        _require_deadline(context)
        key = from_key("key", request.key)
        host, _, port = request.shard.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise InvalidInput("shard", f"is {request.shard!r}", "send host:port of a shard")
        replication = self._replication
        if replication is None:
            return pb.ChangeReplicaReply(changed=False)
        return pb.ChangeReplicaReply(
            changed=await self._in(
                self._slow, lambda: replication.change(key, request.shard, drop=request.drop)
            )
        )

    async def _watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.Event]:
        """Events as they happen, after those missed or a snapshot."""
        self._require_open()
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
                    sequence, snapshot = await self._in(self._slow, self._store.snapshot)
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
        stats = await self._in(self._slow, self._store.stats)
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
            bytes_by_transport=stats.bytes_by_transport,
            leases=stats.leases,
            tombstones=stats.tombstones,
            unwritten=stats.unwritten,
            score_histogram=stats.score_histogram,
        )

    def _in(self, pool: ThreadPoolExecutor, act: Callable[[], R]) -> asyncio.Future[R]:
        """What act gives, in a thread of pool."""

        def ended(_: Future[R]) -> None:
            with self._busy_lock:
                self._busy -= 1

        with self._busy_lock:
            self._busy += 1
        future = pool.submit(act)
        future.add_done_callback(ended)
        return asyncio.wrap_future(future)

    def _span(self, name: str, context: Context, **attributes: Attribute) -> Span:
        metadata = context.invocation_metadata() or ()
        return self._store.telemetry.span(name, metadata, **attributes)


class _Turn:
    """One of the calls that a semaphore lets through, until it ends or takes too long.

    A call whose reader has stopped stands within gRPC until its deadline; it holds up nobody.
    """

    def __init__(self, calls: asyncio.Semaphore) -> None:
        self.over = False
        self._calls = calls
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._calls.acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end()

    def ends_in(self, seconds: float) -> None:
        """Let it last so long from now."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._end)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.over:
            self.over = True
            self._calls.release()


@contextlib.asynccontextmanager
async def _slowness(context: Context) -> AsyncIterator[None]:
    """A bound for what a client sends, however long its deadline: room in memory waits for it."""
    try:
        async with asyncio.timeout(_remaining_s(context, LEASE_S)):
            yield
    except TimeoutError:
        raise Unavailable("cachestore", "the value was sent too slowly") from None


async def _fill(incoming: IncomingPut, messages: AsyncIterator[bytes]) -> PutCompletion:
    """Write the data of messages to where the value is to lie, until its completion.

    Raises InvalidInput.
    """
    num_bytes = incoming.new.info.num_bytes
    views, received = incoming.views, 0
    completion: PutCompletion | None = None
    async for message in messages:
        data = _data(message)
        if completion is not None:
            raise InvalidInput("completion", "is not the last message", "send nothing after it")
        if isinstance(data, pb.PutCompletion):
            completion = from_completion("completion", data, len(incoming.new.part_bytes))
            continue
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
    if completion is None:
        raise InvalidInput("completion", "is missing", "send it as the last message")
    return completion


def _abort_late(begun: asyncio.Future[IncomingPut | PutOutcome]) -> None:
    """Nobody waits any more for the room that was made."""
    if not begun.cancelled() and begun.exception() is None:
        incoming = begun.result()
        if isinstance(incoming, IncomingPut):
            incoming.abort()


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


def _header(index: int, lease: ReadLease) -> pb.GetHeader:
    return to_value_header(
        index, lease.info, lease.parts, lease.shape, lease.value_format, lease.tier
    )


def _is_no_client_gone(record: logging.LogRecord) -> bool:
    """Not what gRPC logs, with a trace, of every reader that goes in the middle of a value."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "ExecuteBatchError"


def _log_failure(done: asyncio.Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.warning("a value that does not match was not dropped: %s", error)


def _remaining_s(context: Context, most_s: float) -> float:
    return min(max(0.0, context.time_remaining() or 0.0), most_s)


def _require_deadline(context: Context) -> None:
    # Values in transit hold memory; without an end to the call a stuck peer would hold it for good.
    if context.time_remaining() is None:
        raise InvalidInput("deadline", "is missing", "give every call that may wait a deadline")


def _data(message: bytes) -> memoryview | pb.PutCompletion:
    """What an encoded PutPart after the first one holds."""
    if (data := data_of(message)) is not None:
        return data
    part = _part(message)
    match part.WhichOneof("part"):
        case "data":
            return memoryview(part.data)
        case "completion":
            return part.completion
        case _:
            raise InvalidInput("header", "came twice", "send it once, then data only")


def _part(message: bytes) -> pb.PutPart:
    try:
        return pb.PutPart.FromString(message)
    except DecodeError as error:
        raise InvalidInput("message", "is no PutPart", "send what the proto says") from error
