"""Thread pools for work in the background of an engine."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor


def unpinned_pool(size: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads may run on all cores of the process.

    vLLM's CPU backend binds a worker to the cores that it computes on, and new threads inherit
    that. They would then compete with the forward pass. Threads that a thread of this pool starts
    (such as gRPC's, for a channel) are not bound either.
    """
    return ThreadPoolExecutor(size, name, initializer=_unpin_thread)


def _unpin_thread() -> None:
    # The kernel reduces this to the container's cores. Not every system has the call.
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
