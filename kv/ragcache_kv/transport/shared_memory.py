"""Memory that a store and its clients map, such that its huge pages are mapped as huge pages.

Copying to memory for the first time costs several times as much as copying, page fault by page
fault: 2,048 of them for 8 MiB, against four where pages are huge. Python's own ``mmap`` neither
chooses an address that huge pages can have, nor knows the call that makes them of a memfd whatever
the system's setting for shared memory (MADV_COLLAPSE, Linux 6.1; containers seldom may change it).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Final

HUGE_BYTES: Final = 2 << 20
"""A huge page, where base pages are 4 KiB; elsewhere none is made."""

_BASE_PAGE_BYTES: Final = 4096
_MADV_COLLAPSE: Final = 25
_MAP_FIXED: Final = 0x10
_PROT_NONE: Final = 0
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class SharedMemory:
    """The first num_bytes (whole pages) of a file, mapped for reading and writing.

    view: its bytes. The mapping ends with the last view of it, whoever has that.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        """fd stays the caller's. Raises OSError if there is no address space for it."""
        self._fd = fd
        self._num_bytes = num_bytes
        self._address = 0
        self.view = memoryview(b"")
        if not num_bytes:
            return
        room_bytes = num_bytes + HUGE_BYTES
        room = _map(0, room_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self._address = -(-room // HUGE_BYTES) * HUGE_BYTES
        try:
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            _map(self._address, num_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
        except OSError:
            _libc.munmap(room, room_bytes)
            raise
        length = num_bytes

        class Mapping(ctypes.Array[ctypes.c_ubyte]):
            _type_ = ctypes.c_ubyte
            _length_ = length

        mapping = Mapping.from_address(self._address)
        # All of the room: what lies around the mapping is part of it.
        weakref.finalize(mapping, _libc.munmap, room, room_bytes).atexit = False
        self.view = memoryview(mapping).cast("B")

    def make_huge(self, offset: int) -> bool:
        """Have the page at offset, a multiple of HUGE_BYTES, be a huge one, whatever it holds.

        False if the system does not do that, or has no such page left.
        """
        if offset + HUGE_BYTES > self._num_bytes or mmap.PAGESIZE != _BASE_PAGE_BYTES:
            return False
        try:
            # Of nothing at all the kernel makes none.
            os.posix_fallocate(self._fd, offset, mmap.PAGESIZE)
        except OSError:
            return False
        return not _libc.madvise(self._address + offset, HUGE_BYTES, _MADV_COLLAPSE)


def _map(address: int, num_bytes: int, protection: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, num_bytes, protection, flags, fd, 0)
    if found is None or found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found)
