"""What clients on this machine see of a store without asking it, in shared memory of one page.

A client that remembers where in shared memory a value is may read it there again. The checksums
tell it whether the bytes are still those; what they cannot tell is that the value is not to be
served any more. So every delete, and every value that gives way to a better one, is counted here
before anybody is told that it is done. And a store that stands still hears of no deletes at all, so
it says here how long ago it did not.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from contextlib import suppress

from ragcache_core.errors import InvalidInput
from ragcache_kv.transport.status_page import ALIVE, WITHDRAWALS

_F_SEAL_FUTURE_WRITE = 0x0010


class StatusPage:
    """The page, to write. Its owner guards it.

    reader_fd: the page as a file that can only be read, for clients to map.
    """

    def __init__(self) -> None:
        """Raises InvalidInput if the system gives no shared memory."""
        try:
            fd = os.memfd_create("ragcache-status_page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(fd, mmap.PAGESIZE)
                seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
                self._map = mmap.mmap(fd, mmap.PAGESIZE)
                with suppress(OSError):  # of Linux 5.1: else who shares memory is trusted with this
                    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
                self.reader_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            finally:
                os.close(fd)
        except OSError as error:
            raise InvalidInput(
                "RAGCACHE_DATA_SOCKET",
                f"cannot be served, for there is no shared memory: {error}",
                "run on Linux 3.17 or later with /proc mounted and memfd_create allowed",
            ) from error
        self._words = memoryview(self._map).cast("Q")
        self.beat()

    def count_withdrawal(self) -> None:
        """Something that may have been read is not to be served any more."""
        self._words[WITHDRAWALS] += 1

    def beat(self) -> None:
        """The store does not stand still."""
        self._words[ALIVE] = time.monotonic_ns()

    def close(self) -> None:
        """Give the page back, as soon as no client maps it."""
        self._words.release()
        self._map.close()
        os.close(self.reader_fd)
