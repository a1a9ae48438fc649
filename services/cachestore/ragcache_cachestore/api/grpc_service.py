"""The gRPC service of the store: decodes and checks requests, calls the store, encodes replies.

Calls that may wait for memory or the disk, and calls that take long, run in threads, so that they
do not block the event loop. Values are sent in pieces. A call has a piece or two in memory, never
a whole value.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Self, TypeVar

import grpc
import grpc.aio

from ragcache_cachestore.api.put_stream import parse_part, receive_value
from ragcache_cachestore.cluster.replicator import Replicator
from ragcache_cachestore.puts import COMMIT_TIMEOUT_S, IncomingPut
from ragcache_cachestore.state.leases import ReadLease
from ragcache_cachestore.storage.checksums import PartChecksums
from ragcache_cachestore.store import Store
from ragcache_cachestore.telemetry.exporter import count_hit, count_miss
from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss
from ragcache_core.storage.extents import Extent
from ragcache_core.store_api import (
    LEASE_S,
    Ack,
    NewVariant,
    PutOutcome,
)
from ragcache_kv.values.conversions import (
    from_deletion,
    from_get_request,
    from_key,
    from_keys,
    from_lookup_request,
    from_pull_positions,
    from_put_header,
    from_use_report,
    to_deletion_batch,
    to_lookup_reply,
    to_miss,
    to_miss_header,
    to_outcome,
    to_value_header,
)
from ragcache_wire.channel import PART_BYTES
from ragcache_wire.feeds.feed_cursor import HEARTBEAT_S, FeedCursor
from ragcache_wire.tracing import Attribute, Span
from ragcache_wire.v1 import cachestore_pb2 as pb
from ragcache_wire.v1 import node_feed_pb2 as feed_pb
from ragcache_wire.value_part import encode_data

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["CacheStore"].full_name
TRANSPORT = "grpc"

PUT_THREADS = 16
"""For puts, which may wait for memory or for the disk."""
READ_THREADS = 8
"""For reads of the disk, so that they do not wait for puts."""
CONTROL_THREADS = 4
DELETE_THREADS = 2
"""For deletes, so that no lookup waits for one. A store applies one after another."""
SLOW_THREADS = 2
"""Threads for long calls that are not urgent, so that no delete waits for them."""
BRIEF_THREADS = 1
"""For brief calls that are not urgent. They wait neither for long ones nor for the disk."""
CLOSE_TIMEOUT_S = 5.0
RETRY_AFTER_S = 1.0
MAX_GETS = 32
"""Bound of the Get calls that send at the same time. Each has about two pieces in memory."""
MAX_PUTS = 64
MAX_WATCHERS = 64
GATHER_S = 0.005
"""How long changes of the feed are gathered for one message."""
INLINE_KEYS = 64
"""Lookups of up to this many keys run in the event loop: handing them to a thread takes longer."""

Context = grpc.aio.ServicerContext[Any, Any]
R = TypeVar("R")


class CacheStoreService:
    """Implements ragcache.v1.CacheStore.

    Args:
        hello: The answer to Hello.
        replicator: None if there is only one shard.
        gated: Until ``open`` is called, answer only Delete, Tombstones and Stats. Shards that start
            at the same time exchange their deletes before they serve values.
    """

    def __init__(
        self,
        store: Store,
        hello: pb.HelloReply,
        replicator: Replicator | None = None,
        *,
        gated: bool = False,
    ) -> None:
        self._store = store
        self._hello_reply = hello
        self._replicator = replicator
        self._gated = gated
        self._writes = ThreadPoolExecutor(PUT_THREADS, thread_name_prefix="puts")
        self._reads = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="reads")
        self._control = ThreadPoolExecutor(CONTROL_THREADS, thread_name_prefix="control")
        self._deletes = ThreadPoolExecutor(DELETE_THREADS, thread_name_prefix="delete")
        self._brief = ThreadPoolExecutor(BRIEF_THREADS, thread_name_prefix="brief")
        self._slow = ThreadPoolExecutor(SLOW_THREADS, thread_name_prefix="slow")
        self._gets = asyncio.Semaphore(MAX_GETS)
        self._puts = asyncio.Semaphore(MAX_PUTS)
        self._watchers: set[asyncio.Event] = set()
        self._busy = 0
        self._busy_lock = threading.Lock()
        self._closed = False

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to a server.

        The handlers are those of the generated code, but values are passed as encoded messages.
        """
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_not_client_gone)
        handlers = {
            "Hello": _unary(self._hello, pb.HelloRequest, pb.HelloReply),
            "Lookup": _unary(self._lookup, pb.LookupRequest, pb.LookupReply),
            "Put": grpc.stream_unary_rpc_method_handler(
                self._put, None, pb.PutReply.SerializeToString
            ),
            "Get": grpc.unary_stream_rpc_method_handler(self._get, pb.GetRequest.FromString),
            "FindMisses": _unary(self._find_misses, pb.FindMissesRequest, pb.FindMissesReply),
            "ReportUses": _unary(self._report_uses, pb.UseReport, pb.UseReportReply),
            "Prefetch": _unary(self._prefetch, pb.PrefetchRequest, pb.PrefetchReply),
            "Delete": _unary(self._delete, pb.DeleteRequest, pb.DeleteReply),
            "FindRemains": _unary(self._find_remains, pb.RemainsRequest, pb.RemainsReply),
            "Tombstones": _stream(self._tombstones, pb.TombstonesRequest, pb.DeletionBatch),
            "DropCopy": _unary(self._drop_copy, pb.DropCopyRequest, pb.DropCopyReply),
            "Watch": _stream(self._watch, feed_pb.WatchRequest, feed_pb.NodeChanges),
            "Stats": _unary(self._stats, pb.StatsRequest, pb.StatsReply),
        }
        generic = grpc.method_handlers_generic_handler(SERVICE, handlers)
        server.add_generic_rpc_handlers((generic,))

    def open(self) -> None:
        """Answer every call from now on."""
        self._gated = False

    def _check_open(self) -> None:
        if self._gated:
            raise Unavailable(
                "cachestore", "it is pulling deletes from the other shards", RETRY_AFTER_S
            )

    def end_watches(self) -> None:
        """End the Watch calls, which otherwise would never end, so that the server can stop."""
        self._closed = True
        for wake in self._watchers:
            wake.set()

    def close(self) -> None:
        """End the threads. No call may follow.

        A call that hangs on the disk is abandoned after CLOSE_TIMEOUT_S. Closing the store ends it.
        """
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        pools = self._writes, self._reads, self._control, self._deletes, self._brief, self._slow
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        while time.monotonic() < deadline and self._busy:
            time.sleep(0.01)
        if self._busy:
            log.warning("shutdown: abandoned calls that hang on the disk count=%d", self._busy)

    async def _hello(self, request: pb.HelloRequest, context: Context) -> pb.HelloReply:
        """Return the ids of the store and the transports that it offers."""
        self._check_open()  # a client that says hello asks for values next
        return self._hello_reply

    async def _lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupReply:
        """Tell which variants are stored, without values."""
        self._check_open()

        def run_lookup() -> pb.LookupReply:
            wanted, exact, domain = from_lookup_request(request)
            if request.lossy:
                self._store.reads.note_lossy_reader()
            return to_lookup_reply(self._store.reads.lookup(wanted, exact, domain), 0)

        with self._span("Lookup", context, keys=len(request.keys)):
            if len(request.keys) <= INLINE_KEYS:
                return run_lookup()
            return await self._run_in(self._control, run_lookup)

    async def _put(self, request_iterator: AsyncIterator[bytes], context: Context) -> pb.PutReply:
        """Store one value. The messages are encoded PutParts (put_stream)."""
        self._check_open()
        _require_deadline(context)
        began = time.monotonic()
        with self._span("Put", context, transport=TRANSPORT) as span:
            async with self._puts:
                new, ack, outcome = await self._receive(request_iterator, context)
            span.set(bytes=new.info.num_bytes, ack=ack.value, outcome=outcome.value)
        seconds = time.monotonic() - began
        self._store.puts.note_put(outcome, ack, TRANSPORT, new.info.num_bytes, seconds)
        return pb.PutReply(outcome=to_outcome(outcome))

    async def _receive(
        self, request_iterator: AsyncIterator[bytes], context: Context
    ) -> tuple[NewVariant, Ack, PutOutcome]:
        messages = aiter(request_iterator)
        async with _send_deadline(context):
            first = parse_part(await anext(messages, b""))
        if first.WhichOneof("part") != "header":
            raise InvalidInput("header", "is missing", "send it as the first message")
        new, ack = from_put_header("header", first.header, self._store.puts.max_value_bytes)
        incoming = await self._begin(new, ack, _remaining_s(context, COMMIT_TIMEOUT_S))
        if isinstance(incoming, PutOutcome):
            return new, ack, incoming
        try:
            async with _send_deadline(context):
                completion = await receive_value(incoming, messages)
        except BaseException:
            incoming.abort()
            raise
        # A commit runs to its end even if the client cancels the call.
        timeout_s = _remaining_s(context, COMMIT_TIMEOUT_S)
        commit = self._run_in(self._writes, lambda: incoming.commit(completion, ack, timeout_s))
        return new, ack, await asyncio.shield(commit)

    async def _begin(self, new: NewVariant, ack: Ack, timeout_s: float) -> IncomingPut | PutOutcome:
        begun = self._run_in(self._writes, lambda: self._store.puts.begin(new, ack, timeout_s))
        try:
            return await asyncio.shield(begun)
        except asyncio.CancelledError:
            begun.add_done_callback(_abort_begun)
            raise

    async def _get(self, request: pb.GetRequest, context: Context) -> AsyncIterator[bytes]:
        """Stream values as encoded GetParts.

        A client that takes longer for a value than a lease lasts loses its slot to another call.
        """
        self._check_open()
        _require_deadline(context)
        with self._span("Get", context, transport=TRANSPORT, keys=len(request.keys)) as span:
            keys, exact, domain, uses = from_get_request(request)
            async with SendSlot(self._gets) as slot:
                for index, (key, use) in enumerate(zip(keys, uses, strict=True)):
                    began = time.monotonic()
                    slot.ends_in(LEASE_S)
                    (lease,) = opened = await self._open(key, exact, domain)
                    self._store.reads.note_opened(opened, [use])
                    if isinstance(lease, Miss):
                        count_miss(span, lease)
                        header = to_miss_header(index, lease)
                        yield pb.GetPart(header=header).SerializeToString()
                        continue
                    sums = PartChecksums([part.num_bytes for part in lease.variant.parts])
                    try:
                        yield pb.GetPart(header=_header(index, lease)).SerializeToString()
                        for extent in _pieces(lease.copy.extents):
                            piece = await self._piece(lease, extent, sums)
                            if slot.expired or not self._store.reads.is_leased(lease.id):
                                raise Unavailable(
                                    "cachestore",
                                    "the lease expired, because the client read too slowly",
                                )
                            yield piece
                    finally:
                        if (
                            sums.first_mismatch([part.checksum for part in lease.variant.parts])
                            is None
                        ):
                            self._store.reads.release([lease.id])
                        else:  # over gRPC a client cannot report a corrupt value
                            release = partial(self._store.reads.release, [lease.id], [lease.id])
                            self._run_in(self._reads, release).add_done_callback(_log_failure)
                    seconds = time.monotonic() - began
                    self._store.reads.note_sent(
                        lease.source, TRANSPORT, lease.variant.info.num_bytes, seconds
                    )
                    count_hit(span, lease.source, lease.variant.info.num_bytes)

    async def _open(self, key: VariantKey, exact: bool, domain: str) -> list[ReadLease | Miss]:
        """Open a value, in a thread if that may read the disk."""
        if not self._store.mover.decrypts:
            return self._store.reads.open([key], exact, domain)
        return await self._run_in(self._reads, lambda: self._store.reads.open([key], exact, domain))

    async def _piece(self, lease: ReadLease, extent: Extent, sums: PartChecksums) -> bytes:
        """Return an encoded GetPart with the bytes of a short extent of a leased value."""
        if not lease.on_disk:
            (view,) = self._store.memory_tier.views([extent])
            sums.add(view)
            return encode_data(view)

        def read() -> bytes:
            piece = memoryview(bytearray(extent.num_bytes))
            # A failed read leaves zeros, which do not match the checksums.
            self._store.disk_tier.read_into([extent], [piece])
            sums.add(piece)
            return encode_data(piece)

        return await self._run_in(self._reads, read)

    async def _find_misses(
        self, request: pb.FindMissesRequest, context: Context
    ) -> pb.FindMissesReply:
        """Tell why variants are not stored."""
        self._check_open()
        keys = from_keys("keys", request.keys)
        misses = await self._run_in(self._brief, lambda: self._store.reads.find_misses(keys))
        return pb.FindMissesReply(
            misses=[pb.MISS_UNSPECIFIED if miss is None else to_miss(miss) for miss in misses]
        )

    async def _report_uses(self, request: pb.UseReport, context: Context) -> pb.UseReportReply:
        """Count uses that needed no Get."""
        self._check_open()
        reports = from_use_report(request)
        counted = await self._run_in(self._brief, lambda: self._store.reads.note_uses(reports))
        return pb.UseReportReply(counted=counted)

    async def _prefetch(self, request: pb.PrefetchRequest, context: Context) -> pb.PrefetchReply:
        """Queue promotions of values on disk, and hold what waiting requests need."""
        self._check_open()
        with self._span("Prefetch", context, keys=len(request.keys)):
            keys, hold_s = from_keys("keys", request.keys), request.hold_ms / 1e3
            started = self._store.variants.prefetch(keys, hold_s)
        return pb.PrefetchReply(started=started)

    async def _delete(self, request: pb.DeleteRequest, context: Context) -> pb.DeleteReply:
        """Remove variants. On reply the delete is durable, and no later read finds them."""
        deletion = from_deletion("deletion", request.deletion)
        _require_deadline(context)
        with self._span("Delete", context):
            removed = await self._run_in(
                self._deletes, lambda: self._store.deletes.apply([deletion])
            )
        return pb.DeleteReply(removed=removed)

    async def _find_remains(self, request: pb.RemainsRequest, context: Context) -> pb.RemainsReply:
        """Count what is held of what a deletion names."""
        self._check_open()
        deletion = from_deletion("deletion", request.deletion)
        found = await self._run_in(self._slow, partial(self._store.deletes.remains, deletion))
        return pb.RemainsReply(
            in_memory=found.in_memory, on_disk=found.on_disk, unfreed=found.unfreed
        )

    async def _tombstones(
        self, request: pb.TombstonesRequest, context: Context
    ) -> AsyncIterator[pb.DeletionBatch]:
        """Stream the deletes that the caller has not pulled, in the order of this store."""
        sequence = from_pull_positions("pulled", request.pulled).get(self._store.store_id, 0)
        batch = None
        while batch is None or batch.sequence != sequence:
            if batch is not None:
                sequence = batch.sequence
            batch = await self._run_in(self._slow, partial(self._store.deletes.after, sequence))
            yield to_deletion_batch(batch)

    async def _drop_copy(self, request: pb.DropCopyRequest, context: Context) -> pb.DropCopyReply:
        """Drop the copy of another shard's variant."""
        self._check_open()
        _require_deadline(context)
        key = from_key("key", request.key)
        replicator = self._replicator
        if replicator is None:
            return pb.DropCopyReply(dropped=False)
        return pb.DropCopyReply(
            dropped=await self._run_in(self._slow, partial(replicator.drop_own_copy, key))
        )

    async def _watch(
        self, request: feed_pb.WatchRequest, context: Context
    ) -> AsyncIterator[feed_pb.NodeChanges]:
        """Stream changes: first those that the watcher missed, or a snapshot."""
        self._check_open()
        if len(self._watchers) >= MAX_WATCHERS:
            raise Unavailable("cachestore", f"it has {MAX_WATCHERS} watchers, the most it serves")
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:  # called within the store's lock, so it must not block
            if not changed.is_set():
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(changed.set)

        self._store.watch(wake)
        self._watchers.add(changed)
        try:
            cursor = FeedCursor(self._store, request.boot, request.after)
            while not self._closed:
                changed.clear()
                if (message := await self._run_in(self._slow, cursor.next)) is not None:
                    yield message
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await changed.wait()
                    # Changes often come in groups, and a message for each would cost more.
                    await asyncio.sleep(GATHER_S)
                if not changed.is_set():
                    yield cursor.heartbeat()
        finally:
            self._watchers.discard(changed)
            self._store.unwatch(wake)

    async def _stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsReply:
        """Return the sizes now, and the counts since the start."""
        return await self._run_in(self._slow, self._store.stats)

    def _run_in(self, pool: ThreadPoolExecutor, act: Callable[[], R]) -> asyncio.Future[R]:
        """Run a function in a thread of a pool."""

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


def _unary(act: Callable[..., Any], request: Any, reply: Any) -> grpc.RpcMethodHandler[Any, Any]:
    return grpc.unary_unary_rpc_method_handler(act, request.FromString, reply.SerializeToString)


def _stream(act: Callable[..., Any], request: Any, reply: Any) -> grpc.RpcMethodHandler[Any, Any]:
    return grpc.unary_stream_rpc_method_handler(act, request.FromString, reply.SerializeToString)


@contextlib.asynccontextmanager
async def _send_deadline(context: Context) -> AsyncIterator[None]:
    """Bound the time in which a client must send, because it occupies memory meanwhile."""
    try:
        async with asyncio.timeout(_remaining_s(context, LEASE_S)):
            yield
    except TimeoutError:
        raise Unavailable("cachestore", "the client sent the value too slowly") from None


def _abort_begun(begun: asyncio.Future[IncomingPut | PutOutcome]) -> None:
    """Abort a put whose call was cancelled while its memory was allocated."""
    if not begun.cancelled() and begun.exception() is None:
        incoming = begun.result()
        if isinstance(incoming, IncomingPut):
            incoming.abort()


def _pieces(extents: Sequence[Extent]) -> Iterator[Extent]:
    """Split extents into pieces of one message each."""
    for extent in extents:
        for offset in range(0, extent.num_bytes, PART_BYTES):
            yield Extent(extent.offset + offset, min(PART_BYTES, extent.num_bytes - offset))


def _header(index: int, lease: ReadLease) -> pb.GetHeader:
    return to_value_header(index, lease.header)


def _is_not_client_gone(record: logging.LogRecord) -> bool:
    """Filter out what gRPC logs, with a stack trace, of each client that leaves during a value."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "ExecuteBatchError"


def _log_failure(done: asyncio.Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.warning("gRPC service: cannot drop a corrupt value error=%s", error)


def _remaining_s(context: Context, max_s: float) -> float:
    return min(max(0.0, context.time_remaining() or 0.0), max_s)


def _require_deadline(context: Context) -> None:
    # A call with a value occupies memory. Without a deadline, a stuck client would never free it.
    if context.time_remaining() is None:
        raise InvalidInput("deadline", "is missing", "set a deadline for every call with a value")


class SendSlot:
    """A slot of a semaphore that a call keeps until it ends or takes too long.

    A call whose client has stopped reading hangs inside gRPC until its deadline. When its time is
    over, another call gets the slot.
    """

    def __init__(self, calls: asyncio.Semaphore) -> None:
        self.expired = False
        self._calls = calls
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._calls.acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end()

    def ends_in(self, seconds: float) -> None:
        """Free the slot after so many seconds from now."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._end)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.expired:
            self.expired = True
            self._calls.release()
