"""The disk tier's bytes: one sparse file, of which the records say what lies where.

A value is written with one system call for each of its extents, straight from the memory it
arrived in, and read straight into the memory that asked; the calls run outside Python's lock.
Nothing here syncs: what ``write`` returned from survives the end of the process, and after a loss
of power the checksums of the parts tell what did not make it.

Why no blob files. RocksDB can keep values too; the cache store's first version did. Side by side
(``bench.layouts``, two busy cores, medians, page cache warm, three runs) this layout stores values
that replace others at 3.1 to 4.4 (64 KiB), 4.5 to 8.9 (1 MiB) and 4.7 to 7.5 times (8 MiB) its
rate, and reads them into the caller's memory at 1.0 to 1.3, 1.6 to 1.9 and at least 1.1 times.
RocksDB writes each value to its log, again to a blob file, and again when that is cleaned, all of
it to new pages of the page cache; here a value is written once, to where another was, and Python's
lock is free meanwhile. Room is exact here, and free at once. What blob files are no worse at:
values of up to 1 MiB in places that were never used before (0.6 to 2.4 times).

Room on the volume. The file is sparse and grows only where it is written to, never beyond its
capacity. A write leaves FREE_RESERVE_BYTES on the volume, because a RocksDB whose log or flush
meets a full disk refuses every write until it is opened again, and without records no value is of
use. Where the file has its blocks already, it is written to however little the volume has left.
When the volume runs low, holes are punched where values were, so that others get the room.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_core.storage.extents import PAGE_BYTES, Extent, ExtentAllocator

FREE_RESERVE_BYTES = 64 << 20
"""Room that a write leaves on the volume: RocksDB's memtables, their log, and a compaction of the
records beside it (``records``), twice over."""

LOW_BYTES = 4 * FREE_RESERVE_BYTES
"""With less than this free on the volume, place that is given back becomes holes at once."""

RETRY_AFTER_S = 60.0
"""When to try a full volume again; it becomes empty by somebody's work, not in a second."""

PUNCH_BYTES = 64 << 20
PUNCH_SHARE = 16
"""Holes are punched in so much at once, and in no more than this fraction of what is free."""

_MAX_VIEWS = 1024
"""Most buffers that one call takes (IOV_MAX of Linux)."""

_PUNCH = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class DiskTier:
    """The file at path, at most capacity_bytes long; created when missing.

    fd: open for reading and writing. reader_fd: for reading only, to hand to clients.
    allocator: what of it is in use. Not safe for threads; its owner guards it. Reads and writes are
    for any number of threads, as long as each keeps to extents that are its own.
    free_bytes: room left on the volume.
    """

    def __init__(
        self, path: Path, capacity_bytes: int, free_bytes: Callable[[], int] | None = None
    ) -> None:
        """Raises InvalidInput if the file cannot be opened."""
        self.allocator = ExtentAllocator(capacity_bytes)
        self._free_bytes = free_bytes or self._volume_free
        self._claim_lock = threading.Lock()
        self._claimed_bytes = 0  # of the volume's room, by writes under way
        try:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self.reader_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if os.fstat(self.fd).st_size > self.allocator.free_bytes:
                os.ftruncate(self.fd, self.allocator.free_bytes)  # the capacity was lowered
        except OSError as error:
            raise InvalidInput(
                "RAGCACHE_DATA_DIR", f"{path} does not open: {error}", "name a writable folder"
            ) from error

    def write(self, extents: Sequence[Extent], views: Sequence[memoryview]) -> None:
        """Write the bytes of views one after another to extents, which have as many bytes.

        Raises Unavailable, with the content of extents unknown, if the disk is full or refuses.
        """
        needed = self._claim_room(extents)
        try:
            for extent, part in _cut(extents, views):
                self._write_all(extent.offset, part)
        except OSError as error:
            full = error.errno in {errno.ENOSPC, errno.EDQUOT}
            raise Unavailable(
                "cachestore",
                f"its disk {'is full' if full else 'refuses'}: {error}",
                retry_after_s=RETRY_AFTER_S,
            ) from error
        finally:
            with self._claim_lock:
                self._claimed_bytes -= needed

    def read_into(self, extents: Sequence[Extent], views: Sequence[memoryview]) -> bool:
        """Read extents into views, which have as many bytes; False if the disk does not give all.

        Nothing is verified: the caller has the checksums.
        """
        try:
            return all(self._read_all(e.offset, part) for e, part in _cut(extents, views))
        except OSError:
            return False

    def punch(self, extents: Sequence[Extent]) -> None:
        """Give the room of extents back to the volume if that runs low. Best effort.

        To be called while they still belong to the caller, right before they are freed: later,
        somebody else's value may be in them.
        """
        if self._free_bytes() < LOW_BYTES:
            self._punch(extents)

    def punch_free(self, lock: AbstractContextManager[object]) -> None:
        """Give the room of everything free back to the volume if that runs low. Best effort.

        To be called now and then, for what was freed when there was plenty. lock: what guards the
        allocator. It is not held while the system works: some free pages at a time, never so many
        that others would lack them, are set aside for that.
        """
        if self._free_bytes() >= LOW_BYTES:
            return
        with lock:
            runs = self.allocator.free_extents()
        for run in runs:
            offset, end = run.offset, run.offset + run.num_bytes
            while offset < end:
                with lock:
                    share = self.allocator.free_bytes // PUNCH_SHARE // PAGE_BYTES * PAGE_BYTES
                    most = max(PAGE_BYTES, min(PUNCH_BYTES, share))
                    piece = Extent(offset, min(most, end - offset))
                    aside = self.allocator.reserve(piece)
                if aside:
                    self._punch((piece,))
                    with lock:
                        self.allocator.unreserve(piece)
                offset += piece.num_bytes

    def close(self) -> None:
        """Close both descriptors."""
        os.close(self.fd)
        os.close(self.reader_fd)

    def _volume_free(self) -> int:
        volume = os.fstatvfs(self.fd)
        return volume.f_bavail * volume.f_frsize

    def _claim_room(self, extents: Sequence[Extent]) -> int:
        """How much of the volume's room a write may take, until it gives that back. Unavailable."""
        num_bytes = sum(e.num_bytes for e in extents)
        with self._claim_lock:
            free = self._free_bytes() - self._claimed_bytes
            if free >= FREE_RESERVE_BYTES + num_bytes:
                self._claimed_bytes += num_bytes
                return num_bytes
        if self._is_filled(extents):
            return 0
        raise Unavailable(
            "cachestore",
            f"its disk is full: {free} bytes are free, this value needs "
            f"{FREE_RESERVE_BYTES + num_bytes}; free space on the volume or lower "
            "RAGCACHE_DISK_BYTES",
            retry_after_s=RETRY_AFTER_S,
        )

    def _is_filled(self, extents: Sequence[Extent]) -> bool:
        """Whether all of extents has its place on the volume already."""
        try:
            return all(
                os.lseek(self.fd, e.offset, os.SEEK_HOLE) >= e.offset + e.num_bytes for e in extents
            )
        except OSError:  # beyond the end of the file
            return False

    def _write_all(self, offset: int, views: list[memoryview]) -> None:
        while views:
            written = os.pwritev(self.fd, views[:_MAX_VIEWS], offset)
            if written == 0:
                raise OSError(errno.EIO, "nothing was written")
            offset += written
            views = _rest(views, written)

    def _read_all(self, offset: int, views: list[memoryview]) -> bool:
        while views:
            num_bytes = os.preadv(self.fd, views[:_MAX_VIEWS], offset)
            if num_bytes == 0:
                return False
            offset += num_bytes
            views = _rest(views, num_bytes)
        return True

    def _punch(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            _libc.fallocate(self.fd, _PUNCH, extent.offset, extent.num_bytes)


def _cut(
    extents: Sequence[Extent], views: Sequence[memoryview]
) -> list[tuple[Extent, list[memoryview]]]:
    """Which bytes of views belong to which extent. Raises ValueError if the totals differ."""
    if sum(e.num_bytes for e in extents) != sum(view.nbytes for view in views):
        raise ValueError("extents and views differ in length")
    rest = [view if view.ndim == 1 and view.itemsize == 1 else view.cast("B") for view in views]
    cut = []
    for extent in extents:
        mine, missing = [], extent.num_bytes
        while missing:
            view = rest[0]
            if len(view) <= missing:
                mine.append(rest.pop(0))
                missing -= len(view)
            else:
                mine.append(view[:missing])
                rest[0] = view[missing:]
                missing = 0
        cut.append((extent, mine))
    return cut


def _rest(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of views after done bytes of them."""
    for index, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[index + 1 :]]
        done -= len(view)
    return []
