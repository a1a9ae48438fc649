"""The memory tier's bytes: one piece of shared memory that clients on this machine map too.

It is a file without a name (memfd), as large as the tier may become, of which only pages that were
written take memory. It is sealed: nobody who maps it can make it shorter, which would kill
every other process at its next read, or longer. Pages once written stay with the memory_tier, also when
the value in them is dropped, so it takes at most its capacity and no more.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterable

from ragcache_core.errors import InvalidInput
from ragcache_core.storage.extents import Extent, ExtentAllocator
from ragcache_kv.transport.shared_memory import HUGE_BYTES, SharedMemory


class MemoryTier:
    """Shared memory of capacity_bytes, mapped once; 0 is allowed and holds nothing.

    fd: the memory as a file, for clients to map; ``allocator.num_pages`` whole pages long.
    allocator: what of it is in use. Not safe for threads; its owner guards it.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """Raises InvalidInput if the system does not give so much address space."""
        self.allocator = ExtentAllocator(capacity_bytes)
        num_bytes = self.allocator.free_bytes
        self._growing = threading.Lock()
        self._grown_bytes = 0
        fd = -1
        try:
            fd = os.memfd_create("ragcache-memory_tier", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, num_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            self._memory = SharedMemory(fd, num_bytes)
        except (OSError, OverflowError) as error:
            if fd >= 0:
                os.close(fd)
            raise InvalidInput(
                "RAGCACHE_MEMORY_BYTES",
                f"{capacity_bytes} bytes of shared memory cannot be had: {error}",
                "set a smaller number, and run on Linux 3.17 or later with memfd_create allowed",
            ) from error
        self.fd = fd

    def views(self, extents: Iterable[Extent]) -> list[memoryview]:
        """The bytes of extents, one writable view for each, no copy."""
        return [self._memory.view[e.offset : e.offset + e.num_bytes] for e in extents]

    def grow(self, extents: Iterable[Extent]) -> None:
        """Have huge pages up to the end of extents that are to be written, if there are any.

        Places are handed out from the memory_tier's start on, so it grows page by page.
        """
        end = max([extent.offset + extent.num_bytes for extent in extents], default=0)
        if end <= self._grown_bytes:
            return
        with self._growing:
            while self._grown_bytes < end:
                offset, self._grown_bytes = self._grown_bytes, self._grown_bytes + HUGE_BYTES
                if not self._memory.make_huge(offset):
                    # Nor will there be others: what is written takes small pages by itself.
                    self._grown_bytes = os.fstat(self.fd).st_size

    def close(self) -> None:
        """Give the memory back, as soon as no view of it is left here and no client maps it."""
        self._memory.view.release()
        os.close(self.fd)
