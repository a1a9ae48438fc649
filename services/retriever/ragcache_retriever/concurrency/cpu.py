"""Cores that this process may use, and the priority of its threads."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

_NICENESS = 10
_MAX_NICENESS = 19


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores that this process may use: at least one.

    Args:
        cgroup: Folder of the process's cgroup (version 2), whose CPU quota applies.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota_us, period_us = (cgroup / "cpu.max").read_text().split()
        cores = min(cores, int(quota_us) // int(period_us))  # ValueError for "max": no quota
    return max(1, cores)


def lower_priority() -> None:
    """Let the system prefer other threads to the calling one, where it can do so (Linux)."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        niceness = os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS
        os.setpriority(os.PRIO_PROCESS, thread, min(_MAX_NICENESS, niceness))
