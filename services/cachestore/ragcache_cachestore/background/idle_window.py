"""Detects idle windows: times without calls, in which background work may run.

Writes to disk and promotions take CPU, memory bandwidth and Python's lock from calls. Calls come in
bursts, because an engine loads and stores all chunks of a prompt at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

IDLE_AFTER_S = 0.02
"""An idle window begins so long after the last call."""

MAX_WAIT_S = 0.5
"""How long work may wait for an idle window. A kill loses the values that are not written yet."""


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
