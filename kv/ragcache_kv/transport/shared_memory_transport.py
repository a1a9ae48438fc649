"""The shared memory transport: the store says where a value is, and the client copies it.

At connect the store passes its memory tier and its file of values. The client maps the memory tier
once for each boot of the store, and reads values on disk straight from the file. A lease keeps a
value at its address. If a client outlives its lease, the checksums show it.

The client reads a value again without asking the store (``extent_cache``). The checksums show
whether the bytes are still those of the value. The store's status page shows that the store runs,
and whether it withdrew a value since, for example by a delete. The connection closes when the store
stops. The client reports such reads to the store afterwards.

The socket of a store is in a folder that its clients see: that of ``ragcache up``, or one of the
pod in which a shard runs beside an engine.
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

from typing_extensions import override

from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, ValuePart
from ragcache_core.store_api import LEASE_S, Ack, NewVariant, PutOutcome
from ragcache_kv.transport.extent_cache import CachedExtents, ExtentCache
from ragcache_kv.transport.framed_transport import (
    FramedTransport,
    OpenCall,
    receive_reply,
    send_credential,
)
from ragcache_kv.transport.framing import ConnectionBroken, FramedConnection, FrameKind, TimedOut
from ragcache_kv.transport.liveness import LivenessConnection, StatusPageView
from ragcache_kv.transport.reader_pair import ReaderPair
from ragcache_kv.transport.shared_memory import SharedMemory
from ragcache_kv.transport.transport import ValueRequest, to_unavailable
from ragcache_kv.values.buffers import (
    copy_verified,
    read_verified,
    scatter,
    slice_views,
    write_from,
)
from ragcache_kv.values.conversions import (
    checked_hello,
    from_outcome,
    to_completion,
    to_get_request,
)
from ragcache_kv.values.outgoing_value import OutgoingRuns, OutgoingValue
from ragcache_kv.values.stored_value import (
    Allocate,
    StoredValue,
    ValueOrMiss,
    allocate_buffer,
    allocate_value,
)
from ragcache_wire.peers.credentials import NO_CREDENTIALS, Credentials
from ragcache_wire.v1 import cachestore_pb2 as pb

MAX_CACHED_EXTENTS = 4096
"""Values whose extents a client remembers."""

KEYS_PER_CALL = 64
"""Values of which one call holds leases. The client asks for more when it has copied these."""

ABORT_S = 0.1
"""Time to tell a store that a put is aborted, even if the put's deadline has passed."""


class MappedStore:
    """What a store shares in one of its boots.

    Attributes:
        memory: Its memory tier.
        file: Descriptor of its file of values.
        status_page: Its status page.
    """

    def __init__(self, memory_fd: int, file_fd: int, status_fd: int) -> None:
        """Take over the descriptors."""
        self.file = file_fd
        self._memory_fd = memory_fd
        weakref.finalize(self, os.close, file_fd)
        weakref.finalize(self, os.close, memory_fd)
        weakref.finalize(self, os.close, status_fd)
        self.memory = SharedMemory(memory_fd, os.fstat(memory_fd).st_size).view
        self.status_page = StatusPageView(status_fd)

    def views(self, extents: Sequence[pb.DataExtent]) -> list[memoryview]:
        """Return the memory of extents. Raises ConnectionBroken for extents outside of it."""
        views = []
        for extent in extents:
            view = self.memory[extent.offset : extent.offset + extent.num_bytes]
            if extent.disk or len(view) != extent.num_bytes:
                raise ConnectionBroken("an extent is not in the shared memory")
            views.append(view)
        return views

    def write(self, extents: Sequence[pb.DataExtent], run: memoryview, start: int) -> None:
        """Copy the bytes of a value from start on to its extents. Raises ConnectionBroken."""
        self.views(extents)  # check them: they come from the store
        done = 0
        for offset, num_bytes in _slice_extents(extents, start, len(run)):
            piece = run[done : done + num_bytes]
            try:
                # The run before may have written to the page in which this one begins.
                if self._was_written(-(-offset // mmap.PAGESIZE) * mmap.PAGESIZE):
                    scatter(piece, [self.memory[offset : offset + num_bytes]])
                else:  # a system call, so that the kernel does not fill pages with zeros first
                    write_from(piece, self._memory_fd, offset)
            except OSError as error:
                raise ConnectionBroken(f"cannot write to the shared memory: {error}") from error
            done += num_bytes
        if done < len(run):
            raise ConnectionBroken("the extents are shorter than the value")

    def _was_written(self, offset: int) -> bool:
        """Return whether the page at offset has memory. Raises OSError."""
        # SEEK_HOLE instead would walk over every page of a full tier.
        try:
            return os.lseek(self._memory_fd, offset, os.SEEK_DATA) == offset
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data from here on
                return False
            raise


class SharedMemoryConnection(FramedConnection):
    """A connection over which the store has passed its memory."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        super().__init__(sock)
        self.deadline = deadline
        self.mapped: MappedStore


GetCall = OpenCall[SharedMemoryConnection, pb.DataGetReply]
PutCall = OpenCall[SharedMemoryConnection, pb.PutGrant]


class SharedMemoryTransport(FramedTransport[SharedMemoryConnection]):
    """Shares the memory of the store whose Unix socket is at path."""

    name = "shared"

    def __init__(self, path: str, boot: bytes, credentials: Credentials = NO_CREDENTIALS) -> None:
        """Connect at the first call. A store with another boot id is refused.

        Args:
            path: Of the socket.
            boot: Boot id of the store.
            credentials: With what the client proves that it belongs to the platform.
        """
        super().__init__(self._open)
        self._path = path
        self._boot = boot
        self._credentials = credentials
        self._lock = threading.Lock()
        self._mapped: MappedStore | None = None
        self._extents = ExtentCache(MAX_CACHED_EXTENTS)
        self._liveness = LivenessConnection(self._open)
        self._reader_pair = ReaderPair()

    @override
    def close(self) -> None:
        self._liveness.close()
        self._reader_pair.close()
        super().close()

    @override
    def get(self, request: ValueRequest) -> Iterator[ValueOrMiss]:
        withdrawals = self._withdrawals
        cached = [self._extents.get(request, key, withdrawals) for key in request.keys]
        if len(cached) == 1 and cached[0] is not None:
            return iter((self._reread_or_fetch(request, request.keys[0], cached[0]),))
        unknown = [key for key, one in zip(request.keys, cached, strict=True) if one is None]
        if len(unknown) == len(cached):
            return self._fetch(request)
        if unknown:
            fetched = self._fetch(replace(request, keys=unknown))
            return self._in_order(request, cached, fetched)
        # Read the first value now, so that a restarted store shows while the call can be repeated.
        first = self._reread_or_fetch(request, request.keys[0], cached[0])
        rest = replace(request, keys=request.keys[1:])
        return chain([first], self._in_order(rest, cached[1:], iter(())))

    @override
    def put(
        self, variant: NewVariant, value: OutgoingValue, ack: Ack, deadline: float
    ) -> PutOutcome:
        runs = OutgoingRuns(variant, value, deadline)
        first = next(runs)
        with self.begin_put(variant, ack, deadline) as call:
            if not call.reply.granted:
                call.done()
                return from_outcome(call.reply.outcome)
            try:
                self._write(call, first, runs)
            except RagCacheError:
                _abort(call)
                raise
            return self.end_put(call)

    @staticmethod
    def _write(call: PutCall, first: memoryview, runs: OutgoingRuns) -> None:
        """Write a value to the granted extents, and commit it.

        Raises ConnectionBroken, IncompleteValue.
        """
        written = 0
        for run in chain([first], runs):
            call.connection.mapped.write(call.reply.extents, run, written)
            written += len(run)
            if not runs.are_complete:  # the store verifies these bytes meanwhile
                call.connection.send(FrameKind.WRITTEN, pb.PutProgress(num_bytes=written))
        call.connection.send(FrameKind.COMMIT, to_completion(runs.completion()))

    def _call(self, request: ValueRequest, start: int) -> GetCall:
        keys = request.keys[start : start + KEYS_PER_CALL]
        message = to_get_request(
            keys,
            request.exact,
            request.domain,
            traceparent=request.traceparent,
            fix_overheads=request.fix_overheads,
        )
        call = self.call(FrameKind.GET, message, FrameKind.GOT, pb.DataGetReply, request.deadline)
        if len(call.reply.values) != len(keys):
            raise ConnectionBroken(f"{len(call.reply.values)} values arrived for {len(keys)} keys")
        return call

    def _fetch(self, request: ValueRequest) -> Iterator[ValueOrMiss]:
        """Ask the store now, and return the values in order."""
        withdrawals = self._withdrawals
        return self._values(request, self._call(request, 0), withdrawals)

    @property
    def _withdrawals(self) -> int:
        """The store's count; before the first connection -1, which no store has."""
        return -1 if self._mapped is None else self._mapped.status_page.withdrawals

    def _values(
        self, request: ValueRequest, call: GetCall, withdrawals: int
    ) -> Iterator[ValueOrMiss]:
        start = 0
        while True:
            with call:
                copies = _leased_copies(request, call, self._reader_pair)
                for index, copied in enumerate(copies, start):
                    _check(request.deadline)
                    began = time.monotonic()
                    copied.copy()
                    call.seconds += time.monotonic() - began
                    if copied.views is not None and isinstance(copied.value, StoredValue):
                        extents = CachedExtents.from_value(copied.value, copied.views, withdrawals)
                        self._extents.put(request, request.keys[index], extents)
                    if copied is copies[-1]:  # before the caller works on the last value
                        _release(call, copies)
                    yield copied.value
            start += KEYS_PER_CALL
            if start >= len(request.keys):
                return
            try:
                withdrawals = self._withdrawals
                call = self._call(request, start)
            except ConnectionBroken as error:
                raise to_unavailable(error) from error

    def _in_order(
        self,
        request: ValueRequest,
        cached: Sequence[CachedExtents | None],
        fetched: Iterator[ValueOrMiss],
    ) -> Iterator[ValueOrMiss]:
        """Yield reread values and fetched ones in the order of the keys."""
        for key, extents in zip(request.keys, cached, strict=True):
            if extents is None:
                yield next(fetched)
                continue
            _check(request.deadline)
            try:
                value = self._reread_or_fetch(request, key, extents)
            except ConnectionBroken as error:
                raise to_unavailable(error) from error
            yield value

    def _reread_or_fetch(
        self, request: ValueRequest, key: VariantKey, extents: CachedExtents | None
    ) -> ValueOrMiss:
        """Read a value from its cached extents, else ask the store. Raises ConnectionBroken."""
        allocate = request.allocate
        if extents is not None:
            value = extents.allocate_value(allocate)
            if self._reread(request, key, extents, value.value):
                return value
            self._extents.remove(request, key)
            allocate = _reuse_buffer(request, value)
        (fetched,) = self._fetch(replace(request, keys=[key], allocate=allocate))
        return fetched

    def _reread(
        self, request: ValueRequest, key: VariantKey, extents: CachedExtents, target: memoryview
    ) -> bool:
        """Copy a value from its extents. Return whether it was still there."""
        began = time.monotonic()
        if not self._reader_pair.read(target, 0, extents.header.parts, extents.copy):
            return False
        try:
            self._liveness.require(request.deadline)
        except RagCacheError:
            return False
        # Check this last: a value that was withdrawn before now is not served.
        mapped = self._mapped
        if (
            mapped is None
            or mapped.status_page.is_silent
            or not extents.is_valid(self._withdrawals)
        ):
            return False
        fix_overhead = request.fix_overheads.get(key, 0.0)
        self._liveness.note_read(key, fix_overhead, time.monotonic() - began)
        return True

    def _open(self, deadline: float) -> SharedMemoryConnection:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection = SharedMemoryConnection(sock, deadline)
            sock.settimeout(max(1e-3, deadline - time.monotonic()))
            sock.connect(self._path)
            sock.setblocking(True)
            send_credential(connection, self._boot, self._credentials.keys)
            sock.settimeout(max(1e-3, deadline - time.monotonic()))
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
        """Read the store's identity and map its memory, unless it is mapped. Closes other fds."""
        try:
            hello = checked_hello(receive_reply(connection, FrameKind.WELCOME, pb.HelloReply))
            if hello.boot != self._boot:
                raise ConnectionBroken(f"another store listens on {self._path}")
            if len(fds) != 3:
                raise ConnectionBroken("the store passed no memory")
            with self._lock:
                if self._mapped is None:
                    memory_fd, file_fd, status_fd = fds
                    fds.clear()
                    self._mapped = MappedStore(memory_fd, file_fd, status_fd)
                connection.mapped = self._mapped
        finally:
            for fd in fds:
                os.close(fd)


class _LeasedCopy:
    """One value of a reply, which the client copies to its own memory.

    Attributes:
        value: The value or the miss.
        lease: Its lease; 0 for a miss.
        corrupt: Whether its bytes do not match its checksums, which the client reports.
        views: Its extents in shared memory; None for a value on disk and for a miss.
    """

    def __init__(
        self,
        leased: pb.LeasedValue,
        request: ValueRequest,
        mapped: MappedStore,
        leased_until: float,
        reader_pair: ReaderPair,
    ) -> None:
        self.value: ValueOrMiss = allocate_value(leased.header, request.allocate)
        self.lease = leased.lease
        self.corrupt = False
        self._leased_until = leased_until
        self._reader_pair = reader_pair
        self._file = mapped.file
        self._extents = leased.extents
        self.views: list[memoryview] | None = None
        if not isinstance(self.value, StoredValue):
            return
        if sum([e.num_bytes for e in self._extents]) != self.value.info.num_bytes:
            raise ConnectionBroken("the extents have another size than the value")
        if not self._extents[0].disk:
            self.views = mapped.views(self._extents)
            return
        for extent in self._extents:  # have the disk read all of them now
            if not _is_cached(self._file, extent.offset + extent.num_bytes - 1):
                os.posix_fadvise(
                    self._file, extent.offset, extent.num_bytes, os.POSIX_FADV_WILLNEED
                )

    def copy(self) -> None:
        """Copy and verify the whole value."""
        value = self.value
        if isinstance(value, StoredValue) and not self._read(value.value, 0, value.parts):
            # After the end of the lease the store may have overwritten the value.
            timed_out = time.monotonic() > self._leased_until
            self.corrupt = not timed_out
            self.value = Miss.TIMED_OUT if timed_out else Miss.CORRUPT

    def _read(self, target: memoryview, start: int, parts: Sequence[ValuePart]) -> bool:
        return self._reader_pair.read(target, start, parts, self._read_part)

    def _read_part(self, target: memoryview, start: int, parts: Sequence[ValuePart]) -> bool:
        if self.views is not None:
            return copy_verified(target, slice_views(self.views, start, len(target)), parts)
        extents = _slice_extents(self._extents, start, len(target))
        try:
            return read_verified(target, self._file, extents, parts)
        except OSError:
            return False


def _is_cached(fd: int, offset: int) -> bool:
    """Return whether the kernel has a byte of a file in memory."""
    with suppress(OSError):
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    return False


def _slice_extents(
    extents: Sequence[pb.DataExtent], start: int, num_bytes: int
) -> Iterator[tuple[int, int]]:
    """Yield (offset, number of bytes) of the extents' bytes from start on."""
    for extent in extents:
        step = min(extent.num_bytes - start, num_bytes)
        if step > 0:
            yield extent.offset + start, step
            num_bytes -= step
        start = max(0, start - extent.num_bytes)


def _leased_copies(
    request: ValueRequest, call: GetCall, reader_pair: ReaderPair
) -> list[_LeasedCopy]:
    mapped, leased_until = call.connection.mapped, call.asked_at + LEASE_S
    try:
        return [
            _LeasedCopy(leased, request, mapped, leased_until, reader_pair)
            for leased in call.reply.values
        ]
    except ConnectionBroken as error:
        raise to_unavailable(error) from error


def _release(call: GetCall, copies: Sequence[_LeasedCopy]) -> None:
    """Release all leases and the connection."""
    leases = [copied.lease for copied in copies if copied.lease]
    call.release(leases, [copied.lease for copied in copies if copied.corrupt])


def _abort(call: PutCall) -> None:
    """Free the memory of a put now. Without this message the store would wait for its timeout."""
    call.connection.deadline = time.monotonic() + ABORT_S
    try:
        call.connection.send(FrameKind.ABORT)
    except ConnectionBroken:
        call.drop()
    else:
        call.done()


def _reuse_buffer(request: ValueRequest, value: StoredValue) -> Allocate:
    """Allocate as requested, but reuse the buffer of value for a value of the same kind."""
    return lambda info: (
        value.value if info == value.info else allocate_buffer(info, request.allocate)
    )


def _check(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise to_unavailable(TimedOut("the deadline has passed"))
