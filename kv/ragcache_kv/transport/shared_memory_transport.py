"""The transport through shared memory: the store says where a value is, the client copies it itself.

At connect the store passes its memory tier, which is mapped here once for each start of the store,
and its file of values, of which values on disk are read straight. A lease keeps a value where it is
meanwhile; should a client outstay it, the checksums tell.

What was read once from memory is read again without asking (``places``): no store need be waited
for, nor take its time. The checksums tell whether the bytes are still those, and the store's board
whether anything was withdrawn since, as by a delete, and that the store does not stand still.
Should it be gone, its connection is closed. It is told afterwards what was read.
"""

from __future__ import annotations

import errno
import mmap
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain

from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, ValuePart
from ragcache_core.store_api import LEASE_S, Ack, NewVariant, PutOutcome
from ragcache_kv.transport.extent_cache import CachedExtents, ExtentCache
from ragcache_kv.transport.framed_transport import FramedTransport, OpenCall, answer
from ragcache_kv.transport.framing import ConnectionBroken, FramedConnection, FrameKind, TimedOut
from ragcache_kv.transport.liveness import LivenessConnection
from ragcache_kv.transport.reader_pair import ReaderPair
from ragcache_kv.transport.shared_memory import SharedMemory
from ragcache_kv.transport.status_page import StatusPageView
from ragcache_kv.transport.transport import ValueRequest, to_unavailable
from ragcache_kv.values.buffers import (
    copy_verified,
    read_verified,
    scatter,
    slice_views,
    write_from,
)
from ragcache_kv.values.conversions import (
    from_hello,
    from_outcome,
    to_completion,
    to_get_request,
)
from ragcache_kv.values.outgoing_value import OutgoingRuns, OutgoingValue
from ragcache_kv.values.stored_value import (
    Allocate,
    LayeredValues,
    StoredValue,
    ValueOrMiss,
    allocate_buffer,
    allocate_value,
    num_layers,
)
from ragcache_wire.v1 import cachestore_pb2 as pb

MAX_CACHED_EXTENTS = 4096
"""Values whose places are remembered."""

KEYS_PER_CALL = 64
"""Values that one call holds leases of. More are asked for when these have been copied."""

ABORT_S = 0.1
"""How long it may take to tell a store that a put is given up, whose own time may be over."""


class MappedStore:
    """What a store shares, from one of its starts.

    memory: its memory tier. file: of values. board: what it says unasked.
    """

    def __init__(self, memory_fd: int, file_fd: int, board_fd: int) -> None:
        """Takes the descriptors."""
        self.file = file_fd
        self._memory_fd = memory_fd
        weakref.finalize(self, os.close, file_fd)
        weakref.finalize(self, os.close, memory_fd)
        weakref.finalize(self, os.close, board_fd)
        self.memory = SharedMemory(memory_fd, os.fstat(memory_fd).st_size).view
        self.board = StatusPageView(board_fd)

    def views(self, extents: Sequence[pb.DataExtent]) -> list[memoryview]:
        """The memory of extents. Raises ConnectionBroken for what is not in it."""
        views = []
        for extent in extents:
            view = self.memory[extent.offset : extent.offset + extent.num_bytes]
            if extent.disk or len(view) != extent.num_bytes:
                raise ConnectionBroken("an extent that is not in the shared memory")
            views.append(view)
        return views

    def write(self, extents: Sequence[pb.DataExtent], run: memoryview, start: int) -> None:
        """Copy what follows the first start bytes of a value to its extents. Raises ConnectionBroken."""
        self.views(extents)  # which are the store's word
        done = 0
        for offset, num_bytes in _cut_places(extents, start, len(run)):
            piece = run[done : done + num_bytes]
            try:
                # The run before may have written to the page that this one begins in.
                if self._was_written(-(-offset // mmap.PAGESIZE) * mmap.PAGESIZE):
                    scatter(piece, [self.memory[offset : offset + num_bytes]])
                else:  # so the kernel need not fill pages with zeros before
                    write_from(piece, self._memory_fd, offset)
            except OSError as error:
                raise ConnectionBroken(
                    f"the shared memory cannot be written to: {error}"
                ) from error
            done += num_bytes
        if done < len(run):
            raise ConnectionBroken("extents that are shorter than the value")

    def _was_written(self, offset: int) -> bool:
        """Whether the page at offset has memory. Raises OSError."""
        # Not by the next hole, before which every page of a full tier would be looked at.
        try:
            return os.lseek(self._memory_fd, offset, os.SEEK_DATA) == offset
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing was written from here on
                return False
            raise


class SharedMemoryConnection(FramedConnection):
    """A connection over which mapped was passed."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        super().__init__(sock)
        self.deadline = deadline
        self.mapped: MappedStore


class SharedMemoryTransport(FramedTransport[SharedMemoryConnection]):
    """Shares the memory of the store whose Unix socket is at path."""

    name = "shared"

    def __init__(self, path: str, boot: bytes) -> None:
        """boot: what the store has said; another one at path is ConnectionBroken."""
        super().__init__(self._open)
        self._path = path
        self._boot = boot
        self._lock = threading.Lock()
        self._mapped: MappedStore | None = None
        self._places = ExtentCache(MAX_CACHED_EXTENTS)
        self._witness = LivenessConnection(self._open)
        self._pair = ReaderPair()

    def close(self) -> None:
        """See Transport."""
        self._witness.close()
        self._pair.close()
        super().close()

    def get(self, asking: ValueRequest) -> Iterator[ValueOrMiss]:
        """See Transport."""
        withdrawals = self._withdrawals
        places = [self._places.get(asking, key, withdrawals) for key in asking.keys]
        # The first one now: a store that was restarted is noticed while it can still be asked anew.
        if len(places) == 1 and places[0] is not None:
            return iter((self._reread_or_ask(asking, asking.keys[0], places[0]),))
        fresh = [key for key, place in zip(asking.keys, places, strict=True) if place is None]
        if len(fresh) == len(places):
            return self._ask_and_read(asking)
        if fresh:
            rest = replace(asking, keys=fresh)
            return self._in_order(asking, places, self._ask_and_read(rest))
        first = self._reread_or_ask(asking, asking.keys[0], places[0])
        rest = replace(asking, keys=asking.keys[1:])
        return chain([first], self._in_order(rest, places[1:], iter(())))

    def get_layers(self, asking: ValueRequest) -> LayeredValues:
        """See Transport. Holds leases of all values until the last layer."""
        asked = self._ask(asking, 0, len(asking.keys))
        copies = asked.keep(lambda: _copies(asking, asked, self._pair))
        return LayeredValues([c.answer for c in copies], self._layers(asking, asked, copies))

    def put(
        self, variant: NewVariant, value: OutgoingValue, ack: Ack, deadline: float
    ) -> PutOutcome:
        """See Transport."""
        runs = OutgoingRuns(variant, value, deadline)
        first = next(runs)
        with self.begin_put(variant, ack, deadline) as asked:
            if not asked.reply.granted:
                asked.done()
                return from_outcome(asked.reply.outcome)
            try:
                self._write(asked, first, runs)
            except RagCacheError:
                _abort(asked)
                raise
            return self.end_put(asked)

    @staticmethod
    def _write(
        asked: OpenCall[SharedMemoryConnection, pb.PutGrant], first: memoryview, runs: OutgoingRuns
    ) -> None:
        """Write a value to where it was granted room, and commit it. Raises ConnectionBroken, IncompleteValue."""
        written = 0
        for run in chain([first], runs):
            asked.connection.mapped.write(asked.reply.extents, run, written)
            written += len(run)
            if not runs.are_complete:  # the store can verify it while the rest is computed
                asked.connection.send(FrameKind.WRITTEN, pb.PutProgress(num_bytes=written))
        asked.connection.send(FrameKind.COMMIT, to_completion(runs.completion()))

    def note_reads(self, keys: Sequence[VariantKey], deadline: float) -> None:
        """See Transport."""
        self._witness.require(deadline)
        for key in keys:
            self._witness.note_read(key, 0.0)

    def _ask(
        self, asking: ValueRequest, start: int, count: int
    ) -> OpenCall[SharedMemoryConnection, pb.DataGetReply]:
        keys = asking.keys[start : start + count]
        request = to_get_request(keys, asking.exact, asking.domain, traceparent=asking.traceparent)
        asked = self.ask(FrameKind.GET, request, FrameKind.GOT, pb.DataGetReply, asking.deadline)
        if len(asked.reply.values) != len(keys):
            raise ConnectionBroken(f"{len(asked.reply.values)} answers for {len(keys)} keys")
        return asked

    def _ask_and_read(self, asking: ValueRequest) -> Iterator[ValueOrMiss]:
        withdrawals = self._withdrawals
        return self._values(asking, self._ask(asking, 0, KEYS_PER_CALL), withdrawals)

    @property
    def _withdrawals(self) -> int:
        """The store's count; -1, which it never is, before the first connection."""
        return -1 if self._mapped is None else self._mapped.board.withdrawals

    def _values(
        self,
        asking: ValueRequest,
        asked: OpenCall[SharedMemoryConnection, pb.DataGetReply],
        withdrawals: int,
    ) -> Iterator[ValueOrMiss]:
        start = 0
        while True:
            with asked:
                copies = _copies(asking, asked, self._pair)
                for place, copied in enumerate(copies, start):
                    _check(asking.deadline)
                    began = time.monotonic()
                    copied.copy()
                    asked.seconds += time.monotonic() - began
                    if copied.views is not None and isinstance(copied.answer, StoredValue):
                        known = CachedExtents.of(copied.answer, copied.views, withdrawals)
                        self._places.remember(asking, asking.keys[place], known)
                    if copied is copies[-1]:  # before whoever asked takes its time
                        _release(asked, copies)
                    yield copied.answer
            start += KEYS_PER_CALL
            if start >= len(asking.keys):
                return
            try:
                withdrawals = self._withdrawals
                asked = self._ask(asking, start, KEYS_PER_CALL)
            except ConnectionBroken as error:
                raise to_unavailable(error) from error

    def _layers(
        self,
        asking: ValueRequest,
        asked: OpenCall[SharedMemoryConnection, pb.DataGetReply],
        copies: list[_Copied],
    ) -> Iterator[list[memoryview | Miss]]:
        with asked:
            last = num_layers([copied.answer for copied in copies]) - 1
            if last < 0:
                _release(asked, copies)
            for layer in range(last + 1):
                _check(asking.deadline)
                began = time.monotonic()
                parts = [copied.copy_layer(layer) for copied in copies]
                asked.seconds += time.monotonic() - began
                if layer == last:
                    _release(asked, copies)
                yield parts

    def _in_order(
        self,
        asking: ValueRequest,
        places: Sequence[CachedExtents | None],
        fresh: Iterator[ValueOrMiss],
    ) -> Iterator[ValueOrMiss]:
        """What is remembered, read again, between what was asked for."""
        for key, place in zip(asking.keys, places, strict=True):
            if place is None:
                yield next(fresh)
                continue
            _check(asking.deadline)
            try:
                answer = self._reread_or_ask(asking, key, place)
            except ConnectionBroken as error:
                raise to_unavailable(error) from error
            yield answer

    def _reread_or_ask(
        self, asking: ValueRequest, key: VariantKey, place: CachedExtents | None
    ) -> ValueOrMiss:
        """The value from where it was, else from the store. Raises ConnectionBroken."""
        allocate = asking.allocate
        if place is not None:
            value = place.allocate_value(allocate)
            if self._reread(asking, key, place, value.value):
                return value
            self._places.forget(asking, key)
            allocate = _again(asking, value)
        (answer,) = self._ask_and_read(replace(asking, keys=[key], allocate=allocate))
        return answer

    def _reread(
        self, asking: ValueRequest, key: VariantKey, place: CachedExtents, target: memoryview
    ) -> bool:
        """Copy a value from its place; whether it still was there. Raises ConnectionBroken."""
        began = time.monotonic()
        if not self._pair.read(target, 0, place.parts, place.copy):
            return False
        try:
            self._witness.require(asking.deadline)
        except RagCacheError:
            return False
        # Last: what was withdrawn until here is not served.
        mapped = self._mapped
        if mapped is None or mapped.board.is_silent or not place.is_valid(self._withdrawals):
            return False
        self._witness.note_read(key, time.monotonic() - began)
        return True

    def _open(self, deadline: float) -> SharedMemoryConnection:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection = SharedMemoryConnection(sock, deadline)
            sock.settimeout(max(1e-3, deadline - time.monotonic()))
            sock.connect(self._path)
            _, fds, _, _ = socket.recv_fds(sock, 1, 3, socket.MSG_CMSG_CLOEXEC)
            sock.setblocking(True)
            self._welcome(connection, fds)
        except (OSError, InvalidInput) as error:
            sock.close()
            raise ConnectionBroken(f"{self._path}: {error}") from error
        except BaseException:
            sock.close()
            raise
        return connection

    def _welcome(self, connection: SharedMemoryConnection, fds: list[int]) -> None:
        try:
            hello = from_hello(answer(connection, FrameKind.WELCOME, pb.HelloReply))
            if hello.boot != self._boot:
                raise ConnectionBroken(f"another store is at {self._path}")
            if len(fds) != 3:
                raise ConnectionBroken("the store passed no memory")
            with self._lock:
                if self._mapped is None:
                    memory_fd, file_fd, board_fd = fds
                    fds.clear()
                    self._mapped = MappedStore(memory_fd, file_fd, board_fd)
                connection.mapped = self._mapped
        finally:
            for fd in fds:
                os.close(fd)


class _Copied:
    """One value of a reply, while it is copied to where it was asked for.

    lease: 0 for a miss. corrupt: whether the store is to be told that its bytes are not right.
    views: where it is in shared memory; None for what is on disk, and for a miss.
    """

    def __init__(
        self,
        found: pb.LeasedValue,
        asking: ValueRequest,
        mapped: MappedStore,
        leased_until: float,
        pair: ReaderPair,
    ) -> None:
        self.answer: ValueOrMiss = allocate_value(found.header, asking.allocate)
        self.lease = found.lease
        self.corrupt = False
        self._leased_until = leased_until
        self._pair = pair
        self._file = mapped.file
        self._extents = found.extents
        self.views: list[memoryview] | None = None
        if not isinstance(self.answer, StoredValue):
            return
        if sum([e.num_bytes for e in self._extents]) != self.answer.info.num_bytes:
            raise ConnectionBroken("extents that are not the value's")
        if not self._extents[0].disk:
            self.views = mapped.views(self._extents)
            return
        for extent in self._extents:  # the disk starts on all of them now
            if not _is_cached(self._file, extent.offset + extent.num_bytes - 1):
                os.posix_fadvise(
                    self._file, extent.offset, extent.num_bytes, os.POSIX_FADV_WILLNEED
                )

    def copy(self) -> None:
        """Copy and verify the whole value."""
        value = self.answer
        if isinstance(value, StoredValue) and not self._copied(value.value, 0, value.parts):
            self._reject()

    def copy_layer(self, layer: int) -> memoryview | Miss:
        """Copy and verify one part; empty beyond the last."""
        value = self.answer
        if not isinstance(value, StoredValue):
            return value
        target = value.part(layer)
        if not target:
            return target
        if self._copied(target, value.start_of(layer), value.parts[layer : layer + 1]):
            return target
        return self._reject()

    def _reject(self) -> Miss:
        # What outstayed its lease may have been overwritten rightly.
        late = time.monotonic() > self._leased_until
        self.corrupt = not late
        self.answer = miss = Miss.TIMED_OUT if late else Miss.CORRUPT
        return miss

    def _copied(self, target: memoryview, start: int, parts: Sequence[ValuePart]) -> bool:
        return self._pair.read(target, start, parts, self._read)

    def _read(self, target: memoryview, start: int, parts: Sequence[ValuePart]) -> bool:
        if self.views is not None:
            return copy_verified(target, slice_views(self.views, start, len(target)), parts)
        places = _cut_places(self._extents, start, len(target))
        try:
            return read_verified(target, self._file, places, parts)
        except OSError:
            return False


def _is_cached(fd: int, offset: int) -> bool:
    """Whether a byte of a file can be had without the disk, as far as the kernel says."""
    with suppress(OSError):
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    return False


def _cut_places(
    extents: Sequence[pb.DataExtent], start: int, num_bytes: int
) -> Iterator[tuple[int, int]]:
    for extent in extents:
        step = min(extent.num_bytes - start, num_bytes)
        if step > 0:
            yield extent.offset + start, step
            num_bytes -= step
        start = max(0, start - extent.num_bytes)


def _copies(
    asking: ValueRequest, asked: OpenCall[SharedMemoryConnection, pb.DataGetReply], pair: ReaderPair
) -> list[_Copied]:
    mapped, leased_until = asked.connection.mapped, asked.asked_at + LEASE_S
    try:
        return [_Copied(found, asking, mapped, leased_until, pair) for found in asked.reply.values]
    except ConnectionBroken as error:
        raise to_unavailable(error) from error


def _release(
    asked: OpenCall[SharedMemoryConnection, pb.DataGetReply], copies: Sequence[_Copied]
) -> None:
    """Let go of all leases, and of the connection."""
    leases = [copied.lease for copied in copies if copied.lease]
    asked.release(leases, [copied.lease for copied in copies if copied.corrupt])


def _abort(asked: OpenCall[SharedMemoryConnection, pb.PutGrant]) -> None:
    """Give a put's room back at once, where the store has to wait for that otherwise."""
    asked.connection.deadline = time.monotonic() + ABORT_S
    try:
        asked.connection.send(FrameKind.ABORT)
    except ConnectionBroken:
        asked.drop()
    else:
        asked.done()


def _again(asking: ValueRequest, value: StoredValue) -> Allocate:
    """Allocate as asked, but for a value that there is memory for."""
    return lambda info: (
        value.value if info == value.info else allocate_buffer(info, asking.allocate)
    )


def _check(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise to_unavailable(TimedOut("the deadline has passed"))
