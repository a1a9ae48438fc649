"""What a client sees of a store on its machine without asking it: one shared page, read only."""

from __future__ import annotations

import mmap
import time

WITHDRAWALS, ALIVE = 0, 1
"""Words of the page, of 64 bits each: how often something that may have been read was withdrawn,
and when the store last said that it does not stand still, in nanoseconds of time.monotonic's clock,
which all processes of a machine share."""

SILENT_S = 2.0
"""After so much silence a store is asked: standing still it hears of no deletes. It says something
every half second."""


class StatusPageView:
    """The page of a store."""

    def __init__(self, fd: int) -> None:
        """fd: as the store has passed it; stays the caller's. Raises OSError."""
        page = mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ)
        self._words = memoryview(page).cast("Q")

    @property
    def withdrawals(self) -> int:
        """How often something was withdrawn."""
        return self._words[WITHDRAWALS]

    @property
    def is_silent(self) -> bool:
        """Whether the store may stand still."""
        return time.monotonic_ns() - self._words[ALIVE] > SILENT_S * 1e9
