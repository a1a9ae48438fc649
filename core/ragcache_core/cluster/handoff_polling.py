"""How long to wait for a prompt that another engine computes, and when to ask for it again."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_PAUSE_S = 0.01
"""Between two questions; a lookup takes a store about a tenth of that."""

PAUSE_SHARE = 0.1
"""Of the time waited until now: nobody learns of it later by more, and few ask a store at a time
however many wait for long."""


@dataclass(slots=True)
class HandoffPolling:
    """Times in seconds, on one clock. began: the first question; ends: when to give it up.

    One question without an answer is a busy store, a second one right after it an outage, which
    nothing is waited for in.
    """

    began: float
    ends: float
    _unanswered: bool = False

    def record_missing(self, now: float) -> float | None:
        """The store answers that something is missing. When to ask again; None: give it up."""
        self._unanswered = False
        return self._next(now)

    def record_no_answer(self, now: float) -> float | None:
        """The store does not answer. When to ask again; None: give it up."""
        if self._unanswered:
            return None
        self._unanswered = True
        return self._next(now)

    def _next(self, now: float) -> float | None:
        if now >= self.ends:
            return None
        return min(self.ends, now + max(LEAST_PAUSE_S, PAUSE_SHARE * (now - self.began)))
