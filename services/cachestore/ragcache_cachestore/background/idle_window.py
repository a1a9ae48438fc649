"""When the store is not called: the time for what nobody waits for.

Writing values out and bringing them in takes the processor, the memory's bandwidth and this
process's lock from the calls that come in, and those come in bursts: an engine loads, and stores,
all that a prompt is made of at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

IDLE_AFTER_S = 0.02
"""A pause: so long no call came in."""

MAX_WAIT_S = 0.5
"""How long work may wait for a pause. What is killed before it is written is lost, as it was only
accepted."""


class IdleWindow:
    """Looks out for idle_window. clock: seconds. Safe for threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._idle_at = 0.0

    def note_call(self) -> None:
        """A call came in: this is no pause."""
        self._idle_at = self.clock() + IDLE_AFTER_S

    def wait_s(self, since: float) -> float:
        """How long what has waited since then has to wait on; 0 or less: no longer."""
        return min(since + MAX_WAIT_S, self._idle_at) - self.clock()
