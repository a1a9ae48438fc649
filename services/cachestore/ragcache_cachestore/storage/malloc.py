"""How the C library keeps the memory of pieces that come and go."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

KEPT_BYTES = 8 << 20
"""Free memory kept for reuse instead of being given back to the system: a few messages. Values lie
in the memory_tier, and what is kept here counts on top of that."""


def reuse_freed_memory() -> None:
    """Let glibc reuse the memory of freed pieces.

    By default it maps every block of a piece's size anew and unmaps it when it is freed, so each
    message pays for page faults over all of its bytes: making and encoding a message of 1 MiB was
    seen to take 1,800 us, and 55 us with this. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest that glibc accepts
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(_M_ARENA_MAX, 2)  # every memory_tier keeps its own free memory
