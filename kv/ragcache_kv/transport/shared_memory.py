"""Memory that a store and its clients map at an address that huge pages can have.

The first copy to memory costs several times as much as a later one, because of page faults: 2,048
of them for 8 MiB, against four with huge pages. Python's ``mmap`` cannot choose the address. It
also lacks MADV_COLLAPSE (Linux 6.1), which makes huge pages of a memfd under every system
setting for shared memory. Containers can seldom change that setting.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Final

HUGE_BYTES: Final = 2 << 20
"""Size of a huge page. Without base pages of 4 KiB none is made."""

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

    view: The bytes. The mapping lasts until the last view of it is gone.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        """Map the file. fd stays the caller's. Raises OSError without enough address space."""
        self._fd = fd
        self._num_bytes = num_bytes
        self._address = 0
        self.view = memoryview(b"")
        if not num_bytes:
            return
        reserved_bytes = num_bytes + HUGE_BYTES
        reserved = _map(0, reserved_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self._address = -(-reserved // HUGE_BYTES) * HUGE_BYTES
        try:
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            _map(self._address, num_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
        except OSError:
            _libc.munmap(reserved, reserved_bytes)
            raise
        length = num_bytes

        class Mapping(ctypes.Array[ctypes.c_ubyte]):
            _type_ = ctypes.c_ubyte
            _length_ = length

        mapping = Mapping.from_address(self._address)
        # Unmap the whole reservation, including what surrounds the mapping.
        weakref.finalize(mapping, _libc.munmap, reserved, reserved_bytes).atexit = False
        self.view = memoryview(mapping).cast("B")

    def make_huge(self, offset: int) -> bool:
        """Turn the page at offset, a multiple of HUGE_BYTES, into a huge page. It keeps its bytes.

        Returns:
            Whether it is a huge page now. The system may lack the call or have no huge page left.
        """
        if offset + HUGE_BYTES > self._num_bytes or mmap.PAGESIZE != _BASE_PAGE_BYTES:
            return False
        try:
            # The kernel makes no huge page of memory that was never written.
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
