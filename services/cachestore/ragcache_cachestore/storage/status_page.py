"""The shared status page, which tells local clients whether a cached read is valid.

A client that remembers the extents of a value may read them again without asking the store. The
checksums tell the client whether the bytes have changed. They do not show whether the value may
still be served. Therefore the store counts every delete, and every replaced value, on the status
page before it acknowledges it. A store that hangs hears of no deletes, so it also writes the time
of its last heartbeat.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from contextlib import suppress

from ragcache_core.errors import InvalidInput
from ragcache_kv.transport.liveness import ALIVE, WITHDRAWALS

_NO_FUTURE_WRITE = 0x0010  # F_SEAL_FUTURE_WRITE in fcntl.h


class StatusPage:
    """The writer's side of the status page. The owner guards it.

    Attributes:
        reader_fd: The page as a read-only file, for clients to map.
    """

    def __init__(self) -> None:
        """Map the page.

        Raises:
            InvalidInput: The system gives no shared memory.
        """
        try:
            fd = os.memfd_create("ragcache-status", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(fd, mmap.PAGESIZE)
                size_flags = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, size_flags)
                self._map = mmap.mmap(fd, mmap.PAGESIZE)
                # Linux before 5.1 lacks this flag. There, a local client could write to the page.
                with suppress(OSError):
                    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _NO_FUTURE_WRITE)
                self.reader_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            finally:
                os.close(fd)
        except OSError as error:
            raise InvalidInput(
                "RAGCACHE_DATA_SOCKET",
                f"cannot be served, because the system gives no shared memory: {error}",
                "run on Linux 3.17 or later with /proc mounted and memfd_create allowed",
            ) from error
        self._words = memoryview(self._map).cast("Q")
        self.beat()

    def count_withdrawal(self) -> None:
        """Count a value that clients may have read and that must not be served any more."""
        self._words[WITHDRAWALS] += 1

    def beat(self) -> None:
        """Write the time of this heartbeat."""
        self._words[ALIVE] = time.monotonic_ns()

    def close(self) -> None:
        """Unmap the page. The system frees it when no client maps it any more."""
        self._words.release()
        self._map.close()
        os.close(self.reader_fd)
