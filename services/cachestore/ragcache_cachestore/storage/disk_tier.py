"""The bytes of the disk tier: one sparse file. The metadata says which extent has which value.

A write takes one system call for each extent, straight from the memory in which the value arrived.
A read goes straight into the caller's memory. The calls run outside Python's lock. Nothing here
syncs: what ``write`` returned from survives the end of the process. After a loss of power, the
checksums of the parts show which values were not written.

Why no blob files. RocksDB can store values too, and the first version of the cache store used it.
Both were compared for release 0.4 (two busy cores, medians of three runs, page cache warm). This
layout replaces values at 3.1 to 4.4 (64 KiB), 4.5 to 8.9 (1 MiB) and 4.7 to 7.5 times (8 MiB)
the rate of RocksDB. It reads them into the caller's memory at 1.0 to 1.3, 1.6 to 1.9 and at least
1.1 times that rate. RocksDB writes each value to its log, again to a blob file, and again when it
cleans that file, each time to new pages of the page cache. Here each value is written once, to
pages that were used before, and Python's lock is free meanwhile. The used space is exact and free
at once. Blob files are as good for values of up to 1 MiB in unused space (0.6 to 2.4 times).

Space on the volume. The file grows only where it is written to, and never beyond its capacity. A
write leaves FREE_RESERVE_BYTES on the volume. If a RocksDB log or flush meets a full disk, RocksDB
refuses every write until it is opened again, and without metadata no value is usable. Blocks that
the file already has are written even if the volume is full. When the volume runs low, the store
returns free pages to it (``fallocate`` with ``PUNCH_HOLE``).
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ragcache_cachestore.storage.disk_cipher import SLICE_BYTES, ValueEncryption, slices
from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_core.storage.extents import PAGE_BYTES, Extent
from ragcache_core.storage.packed_extents import PackingAllocator

FREE_RESERVE_BYTES = 64 << 20
"""Space that a write leaves on the volume: twice RocksDB's memtables, log and one compaction."""

LOW_BYTES = 4 * FREE_RESERVE_BYTES
"""With less free space on the volume, freed pages are returned to it at once."""

RETRY_AFTER_S = 60.0
"""When to try a full volume again. An operator must free it, which takes time."""

PUNCH_BYTES = 64 << 20
PUNCH_SHARE = 16
"""One call returns at most PUNCH_BYTES, and at most this fraction of the free bytes."""

_MAX_VIEWS = 1024
"""Bound of the buffers of one call (IOV_MAX of Linux)."""

_PUNCH = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class DiskTier:
    """The file of values, at most capacity_bytes long, and created if it is missing.

    Any number of threads may read and write, as long as each uses its own extents.

    Args:
        free_bytes: Returns the free bytes of the volume. Tests pass their own.

    Attributes:
        fd: Open for reading and writing.
        reader_fd: Open for reading only, to pass to clients.
        allocator: The used pages. The owner guards it.
    """

    def __init__(
        self, path: Path, capacity_bytes: int, free_bytes: Callable[[], int] | None = None
    ) -> None:
        """Open the file.

        Raises:
            InvalidInput: The file cannot be opened.
        """
        self.allocator = PackingAllocator(capacity_bytes)
        self._free_bytes = free_bytes or self._volume_free
        self._claim_lock = threading.Lock()
        self._claimed_bytes = 0  # of the volume's free space, by writes that are running
        try:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self.reader_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if os.fstat(self.fd).st_size > self.allocator.free_bytes:
                os.ftruncate(self.fd, self.allocator.free_bytes)  # the capacity was lowered
        except OSError as error:
            raise InvalidInput(
                "RAGCACHE_DATA_DIR", f"{path} cannot be opened: {error}", "name a writable folder"
            ) from error

    def write(
        self,
        extents: Sequence[Extent],
        views: Sequence[memoryview],
        encryption: ValueEncryption | None = None,
    ) -> None:
        """Write views one after another to extents of the same total length.

        Args:
            encryption: Encrypts what is written. None: it is written as it is.

        Raises:
            Unavailable: The disk is full or fails. The content of extents is then undefined.
        """
        needed = self._claim_room(extents)
        try:
            for extent, part in _cut(extents, views):
                if encryption is None:
                    self._write_all(extent.offset, part)
                else:
                    self._write_encrypted(extent.offset, part, encryption)
        except OSError as error:
            full = error.errno in {errno.ENOSPC, errno.EDQUOT}
            raise Unavailable(
                "cachestore",
                f"its disk {'is full' if full else 'refuses writes'}: {error}",
                retry_after_s=RETRY_AFTER_S,
            ) from error
        finally:
            with self._claim_lock:
                self._claimed_bytes -= needed

    def read_into(self, extents: Sequence[Extent], views: Sequence[memoryview]) -> bool:
        """Read extents into views of the same total length, without verifying checksums.

        Returns False if the disk does not give all bytes.
        """
        try:
            return all(self._read_all(e.offset, part) for e, part in _cut(extents, views))
        except OSError:
            return False

    def punch(self, extents: Sequence[Extent]) -> None:
        """Return extents to the volume if it runs low. Failures are ignored.

        The caller must still own the extents. It frees them right afterwards.
        """
        if self._free_bytes() < LOW_BYTES:
            self._punch(extents)

    def punch_free(self, lock: AbstractContextManager[object], *, if_low: bool = True) -> None:
        """Return all free extents to the volume. Failures are ignored.

        The sweeper calls this now and then, for extents that were freed while the volume had space.

        Args:
            lock: Guards the allocator. It is not held during system calls. Instead, a small share
                of the free pages is reserved for each call.
            if_low: Only if the volume runs low.
        """
        if if_low and self._free_bytes() >= LOW_BYTES:
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
                    reserved = self.allocator.reserve(piece)
                if reserved:
                    self._punch((piece,), or_overwrite=not if_low)
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
        """Reserve space on the volume for a write. Returns the bytes that the write must return.

        Raises:
            Unavailable: The volume is full.
        """
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
            f"its disk is full: {free} bytes are free, the value needs "
            f"{FREE_RESERVE_BYTES + num_bytes}; free space on the volume or lower "
            "RAGCACHE_DISK_BYTES",
            retry_after_s=RETRY_AFTER_S,
        )

    def _is_filled(self, extents: Sequence[Extent]) -> bool:
        """Return whether the volume has blocks for all of extents."""
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

    def _write_encrypted(
        self, offset: int, views: list[memoryview], encryption: ValueEncryption
    ) -> None:
        buffer = memoryview(bytearray(min(SLICE_BYTES, max(map(len, views), default=0))))
        for piece in slices(views):
            target = buffer[: len(piece)]
            encryption.encrypt(piece, target)
            self._write_all(offset, [target])
            offset += len(piece)

    def _read_all(self, offset: int, views: list[memoryview]) -> bool:
        while views:
            num_bytes = os.preadv(self.fd, views[:_MAX_VIEWS], offset)
            if num_bytes == 0:
                return False
            offset += num_bytes
            views = _rest(views, num_bytes)
        return True

    def _punch(self, extents: Sequence[Extent], *, or_overwrite: bool = False) -> None:
        for extent in extents:
            failed = _libc.fallocate(self.fd, _PUNCH, extent.offset, extent.num_bytes)
            if failed and or_overwrite:
                zeros = memoryview(bytes(min(SLICE_BYTES, extent.num_bytes)))
                for start in range(0, extent.num_bytes, SLICE_BYTES):
                    piece = zeros[: extent.num_bytes - start]
                    self._write_all(extent.offset + start, [piece])


def _cut(
    extents: Sequence[Extent], views: Sequence[memoryview]
) -> list[tuple[Extent, list[memoryview]]]:
    """Split views at the ends of extents. Raises ValueError if the totals differ."""
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


def _rest(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of views after num_bytes of them."""
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []
