"""What a process in a sandbox writes to its standard error, for the log of who has started it.

A document may have taken over the process. So its lines go to memory of a limited size, and the log
gets their beginning as one line of ASCII.
"""

from __future__ import annotations

import os
import resource
from typing import Final

MAX_BYTES: Final = 64 << 10
"""Most that a process may write (``limit_own_errors``)."""

_MAX_LOGGED_BYTES: Final = 2000


class ChildErrors:
    """Memory in place of the standard error of a process.

    Attributes:
        descriptor: Of the memory. The process gets it.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("errors")

    def text(self) -> str:
        """Return the beginning of what the process has written, in ASCII; empty: nothing."""
        written = os.pread(self.descriptor, _MAX_LOGGED_BYTES, 0).decode(errors="replace")
        left_out = os.fstat(self.descriptor).st_size - _MAX_LOGGED_BYTES
        more = f" and {left_out} bytes more" if left_out > 0 else ""
        return f"{written!a}{more}" if written else ""

    def close(self) -> None:
        """Free the memory, as soon as the process has ended."""
        os.close(self.descriptor)


def limit_own_errors() -> None:
    """Limit the files that this process writes, and so its errors. It writes to pipes at will."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_BYTES, MAX_BYTES))
