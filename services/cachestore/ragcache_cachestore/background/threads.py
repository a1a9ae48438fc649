"""Joins threads with a timeout, so that a hung disk cannot block shutdown."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 5.0
"""How long a thread may take to finish its current work."""


def join_all(threads: Iterable[threading.Thread], timeout_s: float = JOIN_TIMEOUT_S) -> bool:
    """Join threads that were told to end. Log an error and return False if one has not ended.

    The threads are daemons: one that hangs ends with the process.
    """
    deadline = time.monotonic() + timeout_s
    stuck = []
    for thread in threads:
        if thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            stuck.append(thread.name)
    if stuck:
        log.error(
            "shutdown: threads have not ended timeout_s=%.0f threads=%s",
            timeout_s,
            ",".join(stuck),
        )
    return not stuck
