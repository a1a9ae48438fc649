"""The memory tier's bytes: one piece of shared memory that clients on this machine map too.

It is a file without a name (memfd), as large as the tier may become, of which only pages that were
written take memory. It is sealed: nobody who maps it can make it shorter, which would kill
every other process at its next read, or longer. Pages once written stay with the arena, also when
the value in them is dropped, so it takes at most its capacity and no more.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterable

from ragcache_core.errors import InvalidInput
from ragcache_core.extents import Extent, ExtentAllocator


class Arena:
    """Shared memory of capacity_bytes, mapped once; 0 is allowed and holds nothing.

    fd: the memory as a file, for clients to map; ``allocator.num_pages`` whole pages long.
    allocator: what of it is in use. Not safe for threads; its owner guards it.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """Raises InvalidInput if the system does not give so much address space."""
        self.allocator = ExtentAllocator(capacity_bytes)
        num_bytes = self.allocator.free_bytes
        self._map: mmap.mmap | None = None
        self._view = memoryview(b"")
        fd = -1
        try:
            fd = os.memfd_create("ragcache-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, num_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            if num_bytes:
                self._map = mmap.mmap(fd, num_bytes)
                self._view = memoryview(self._map)
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
        return [self._view[e.offset : e.offset + e.num_bytes] for e in extents]

    def close(self) -> None:
        """Give the memory back, as soon as no view of it is left here and no client maps it."""
        self._view.release()
        if self._map is not None:
            with contextlib.suppress(BufferError):  # views are out; the last one frees it
                self._map.close()
        os.close(self.fd)
