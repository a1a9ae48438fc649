"""The bytes of the memory tier: one shared mapping that clients on this machine map too.

The mapping is an anonymous file (memfd), as large as the tier may become. Only pages that were
written take memory. File flags keep every client from truncating or extending it.
Truncation would kill every other process at its next read. A page that was written stays with the
tier when its value is dropped, so the tier takes at most its capacity.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterable
from contextlib import suppress

from ragcache_core.errors import InvalidInput
from ragcache_core.storage.extents import Extent, ExtentAllocator
from ragcache_kv.transport.shared_memory import HUGE_BYTES, SharedMemory


class MemoryTier:
    """Shared memory of a fixed capacity, mapped once. A capacity of 0 is allowed.

    Attributes:
        fd: The memory as a file for clients to map, ``allocator.num_pages`` whole pages long.
        allocator: The used pages. The owner guards it.
    """

    def __init__(self, capacity_bytes: int, *, owns_pages: bool = False) -> None:
        """Map the memory.

        Args:
            owns_pages: Whether ``grow`` takes the pages of extents. Otherwise the first process
                that writes to a page takes it, and its control group is charged for it.

        Raises:
            InvalidInput: The system does not give so much address space.
        """
        self.allocator = ExtentAllocator(capacity_bytes)
        num_bytes = self.allocator.free_bytes
        self._grow_lock = threading.Lock()
        self._grown_bytes = 0
        self._owns_pages = owns_pages
        self._owned_bytes = 0
        fd = -1
        try:
            fd = os.memfd_create("ragcache-memory", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, num_bytes)
            size_flags = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, size_flags)
            self._memory = SharedMemory(fd, num_bytes)
        except (OSError, OverflowError) as error:
            if fd >= 0:
                os.close(fd)
            raise InvalidInput(
                "RAGCACHE_MEMORY_BYTES",
                f"the system does not give {capacity_bytes} bytes of shared memory: {error}",
                "set a smaller number, and run on Linux 3.17 or later with memfd_create allowed",
            ) from error
        self.fd = fd

    def views(self, extents: Iterable[Extent]) -> list[memoryview]:
        """Return one writable view of each extent, without a copy."""
        return [self._memory.view[e.offset : e.offset + e.num_bytes] for e in extents]

    def grow(self, extents: Iterable[Extent]) -> None:
        """Allocate huge pages up to the end of extents that are about to be written.

        The allocator hands out pages from the start of the tier, so it grows page by page.
        """
        end = max([extent.offset + extent.num_bytes for extent in extents], default=0)
        if end <= self._grown_bytes and (end <= self._owned_bytes or not self._owns_pages):
            return
        with self._grow_lock:
            while self._grown_bytes < end:
                offset, self._grown_bytes = self._grown_bytes, self._grown_bytes + HUGE_BYTES
                if not self._memory.make_huge(offset):
                    # There are no more huge pages. The kernel gives small pages on write.
                    self._grown_bytes = os.fstat(self.fd).st_size
            if self._owns_pages and end > self._owned_bytes:
                # Without memory for them, a client takes them when it writes.
                with suppress(OSError):
                    os.posix_fallocate(self.fd, self._owned_bytes, end - self._owned_bytes)
                self._owned_bytes = end

    def close(self) -> None:
        """Unmap the memory. The system frees it when no client maps it any more."""
        self._memory.view.release()
        os.close(self.fd)
