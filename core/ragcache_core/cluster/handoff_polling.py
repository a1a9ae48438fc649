"""When to ask a store again for a prompt that another engine is computing."""

from __future__ import annotations

from dataclasses import dataclass

MIN_INTERVAL_S = 0.01
"""Least time between two lookups; a lookup takes a store about a tenth of that."""

INTERVAL_SHARE = 0.02
"""Time between two lookups, as a share of the time waited so far.

So the engine learns of the prompt at most this share later, and long waits cost few lookups.
"""


@dataclass(slots=True)
class HandoffPolling:
    """Schedules the lookups of one prompt. Times are seconds on one clock.

    One lookup without an answer may be a busy store. A second one right after it is an outage, and
    the engine stops waiting.

    Attributes:
        started_at: Time of the first lookup.
        deadline: Time to abort.
    """

    started_at: float
    deadline: float
    _last_unanswered: bool = False

    def record_missing(self, now: float) -> float | None:
        """Record that the store does not have a variant.

        Returns:
            The time of the next lookup. None: abort.
        """
        self._last_unanswered = False
        return self._next_lookup(now)

    def record_no_answer(self, now: float) -> float | None:
        """Record that the store did not answer.

        Returns:
            The time of the next lookup. None: abort.
        """
        if self._last_unanswered:
            return None
        self._last_unanswered = True
        return self._next_lookup(now)

    def _next_lookup(self, now: float) -> float | None:
        if now >= self.deadline:
            return None
        return min(
            self.deadline, now + max(MIN_INTERVAL_S, INTERVAL_SHARE * (now - self.started_at))
        )
