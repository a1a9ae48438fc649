"""How often something that may have been read was withdrawn: a count that clients look at.

A client on this machine that remembers where in shared memory a value is may read it again without
asking. The checksums tell it whether the bytes are still those; what they cannot tell is that the
value is not to be served any more. So every delete, and every value that gives way to a better one,
counts up here before anybody is told that it is done.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from ragcache_core.errors import InvalidInput


class Withdrawals:
    """The count, in shared memory of one page. Its owner guards it.

    reader_fd: the page as a file that can only be read, for clients to map.
    """

    def __init__(self) -> None:
        """Raises InvalidInput if the system gives no shared memory."""
        try:
            fd = os.memfd_create("ragcache-withdrawals", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(fd, mmap.PAGESIZE)
                seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
                self._map = mmap.mmap(fd, mmap.PAGESIZE)
                self.reader_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            finally:
                os.close(fd)
        except OSError as error:
            raise InvalidInput(
                "RAGCACHE_LANE_SOCKET",
                f"cannot be served, for there is no shared memory: {error}",
                "run on Linux 3.17 or later with /proc mounted and memfd_create allowed",
            ) from error
        self._count = memoryview(self._map).cast("Q")

    def add(self) -> None:
        """Something was withdrawn."""
        self._count[0] += 1

    def close(self) -> None:
        """Give the page back, as soon as no client maps it."""
        self._count.release()
        self._map.close()
        os.close(self.reader_fd)
