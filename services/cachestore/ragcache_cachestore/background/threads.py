"""The end of a thread, which a stuck disk must not make the end of the patience of others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

log = logging.getLogger(__name__)

END_TIMEOUT_S = 5.0
"""How long a thread may take for the work at hand."""


def end(threads: Iterable[threading.Thread], timeout_s: float = END_TIMEOUT_S) -> bool:
    """Wait until threads that were told to end have; False, and a line in the log, if one has not.

    Such a thread is a daemon: it ends with the process.
    """
    deadline = time.monotonic() + timeout_s
    stuck = []
    for thread in threads:
        if thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            stuck.append(thread.name)
    if stuck:
        log.error("still at work after %.0f s: %s", timeout_s, ", ".join(stuck))
    return not stuck
