"""When the refusals of one caller are answered.

A client that ignores ``Retry-After`` sends its next request as soon as it has the refusal. So the
refusals beyond a burst are answered one after the other at a rate. A connection waits for its
answer meanwhile, so it cannot ask again. A client that obeys never notices: its refusals are rarer
than the rate.

Source: Generic cell rate algorithm (ITU-T I.371), with a bounded delay in place of a discard.
"""

from __future__ import annotations

import math
from typing import Final

REFUSALS_PER_S: Final = 50.0
"""Rate of the refusals that follow a burst."""

BURST: Final = 50
"""Refusals that are answered at once after a pause."""

MAX_DELAY_S: Final = 5.0
"""Longest delay. A client that waits that long has also waited what most refusals ask for."""


class RefusalPace:
    """The refusals of one caller."""

    def __init__(self) -> None:
        self._due_s = -math.inf  # when the last refusal is due at the rate

    def delay_s(self, now_s: float) -> float:
        """Return the seconds until a refusal is answered, from 0 to ``MAX_DELAY_S``.

        Args:
            now_s: Time on any steady clock, in seconds.
        """
        earliest_s = now_s - BURST / REFUSALS_PER_S
        due_s = max(self._due_s, earliest_s) + 1 / REFUSALS_PER_S
        self._due_s = min(due_s, now_s + MAX_DELAY_S)
        return max(0.0, self._due_s - now_s)
