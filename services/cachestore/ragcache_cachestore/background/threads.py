"""What the threads of a store share: idle windows to work in, and an end despite a hung disk.

Writes to disk and promotions take CPU, memory bandwidth and Python's lock from calls. Calls come in
bursts, because an engine loads and stores all chunks of a prompt at once. So this work waits for
an idle window, a time without calls.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 5.0
"""How long a thread may take to finish its current work."""

IDLE_AFTER_S = 0.02
"""An idle window begins so long after the last call."""

MAX_WAIT_S = 0.5
"""How long work may wait for an idle window. A kill loses the values that are not written yet."""


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


class IdleWindow:
    """Tells when the next idle window begins. Safe to use from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._idle_at = 0.0

    def note_call(self) -> None:
        """Note that a call has come in."""
        self._idle_at = self.clock() + IDLE_AFTER_S

    def wait_s(self, since: float) -> float:
        """Return how long work that was queued at since must still wait, 0 or less for not."""
        return min(since + MAX_WAIT_S, self._idle_at) - self.clock()
