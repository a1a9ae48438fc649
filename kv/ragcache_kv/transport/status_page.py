"""A page of shared memory in which a store publishes its state to clients on its machine."""

from __future__ import annotations

import mmap
import time

WITHDRAWALS, ALIVE = 0, 1
"""The page's words of 64 bits.

WITHDRAWALS counts how often the store withdrew values that clients may have read. ALIVE is the last
time at which the store reported that it runs, in nanoseconds of time.monotonic's clock, which all
processes of a machine share.
"""

SILENT_S = 2.0
"""After this time without a report, clients ask the store itself. It reports every half second, and
a store that does not run receives no deletes."""


class StatusPageView:
    """A client's read-only view of a store's status page."""

    def __init__(self, fd: int) -> None:
        """Map the page. fd stays the caller's. Raises OSError."""
        page = mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ)
        self._words = memoryview(page).cast("Q")

    @property
    def withdrawals(self) -> int:
        """How often the store withdrew values."""
        return self._words[WITHDRAWALS]

    @property
    def is_silent(self) -> bool:
        """Whether the store's last report is older than SILENT_S."""
        return time.monotonic_ns() - self._words[ALIVE] > SILENT_S * 1e9
