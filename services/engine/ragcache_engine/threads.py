"""Threads beside the engine's own."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor


def side_pool(size: int, name: str) -> ThreadPoolExecutor:
    """Threads that may run on every core the process may use.

    vLLM's CPU backend binds a worker to the cores it computes on, and what the worker starts
    inherits that: fetching and saving would then take turns with the forward pass. What a thread
    of this pool starts (gRPC's threads, for a channel made on it) is free as well.
    """
    return ThreadPoolExecutor(size, name, initializer=_use_every_core)


def _use_every_core() -> None:
    # The kernel cuts this down to what the container was given. Not every system has the call.
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
