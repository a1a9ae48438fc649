"""Predicts when a request that is refused now could be served, for ``Retry-After``.

A full pool of requests predicts it from the time that its requests take (``SlotForecast``), a
component that is down from its earlier outages (``OutageForecast``). ``jitter`` then spreads the
clients, so that those which were refused together do not all return together.
"""

from __future__ import annotations

import math
from collections import deque

MIN_WAIT_S = 1.0
"""Shortest wait. ``Retry-After`` has whole seconds, and a retry costs both sides something."""

MAX_WAIT_S = 40.0
"""Longest predicted wait. With jitter it stays within 60 s, beyond which OpenAI's clients ignore
``Retry-After``."""

JITTER_SHARE = 0.5
"""Most that jitter adds to a wait, as a share of it."""

MIN_JITTER_S = 2.0
"""Jitter spreads clients over at least this time."""

MAX_OUTAGES = 16
"""Number of most recent outages that count."""

_NEW_WEIGHT = 0.1
"""Weight of the newest request in the mean service time."""


def jitter(wait_s: float, unit: float) -> float:
    """Return a wait that is not below the predicted one.

    Args:
        wait_s: Predicted wait.
        unit: A random number from 0 to 1.
    """
    bounded_s = min(max(wait_s, MIN_WAIT_S), MAX_WAIT_S)
    return bounded_s + unit * max(JITTER_SHARE * bounded_s, MIN_JITTER_S)


class SlotForecast:
    """Predicts when a full pool has a free slot.

    Refused clients form a queue outside the server. Each client is promised the next slot that no
    earlier client was promised. Each freed slot fulfils one promise, so the queue is empty when the
    congestion ends.
    """

    def __init__(self) -> None:
        self._service_s: float | None = None
        self._promised_at = -math.inf
        self._interval_s = 0.0
        self._num_promised = 0.0
        """Promised slots that are not free yet; a fraction, because a wait is bounded."""

    def record(self, now: float, service_s: float) -> None:
        """Record that a slot is free, and how long a request held it.

        Args:
            now: Time on any steady clock, in seconds.
        """
        if self._service_s is None:
            self._service_s = service_s
        self._service_s += _NEW_WEIGHT * (service_s - self._service_s)
        self._num_promised = max(0.0, self._num_promised - 1)
        expected_at = now + self._num_promised * self._interval_s
        self._promised_at = min(self._promised_at, expected_at)

    def promise_slot_s(self, now: float, num_slots: int, mean_age_s: float) -> float:
        """Promise a refused request the next slot; return the time until then.

        Args:
            now: Time on the clock of ``record``, in seconds.
            num_slots: Slots of the pool, all taken.
            mean_age_s: Mean time that the requests in the slots have held them. It stands for the
                service time if that is not known, and if the requests are stuck.
        """
        service_s = max(self._service_s or 0.0, mean_age_s)
        self._interval_s = service_s / max(1, num_slots)
        next_s = max(self._promised_at, now) + self._interval_s
        self._promised_at = min(next_s, now + MAX_WAIT_S)
        wait_s = self._promised_at - now
        self._num_promised = wait_s / self._interval_s if self._interval_s else 0.0
        return wait_s


class OutageForecast:
    """Predicts when a component recovers, from its earlier outages and the age of this one."""

    def __init__(self) -> None:
        self._outages_s: deque[float] = deque(maxlen=MAX_OUTAGES)
        self._down_since: float | None = None
        self._was_up = False

    def record(self, now: float, *, is_up: bool) -> None:
        """Record whether the component is up. What precedes its first time up is its start."""
        if not is_up:
            if self._down_since is None:
                self._down_since = now
            return
        if self._down_since is not None and self._was_up:
            self._outages_s.append(now - self._down_since)
        self._down_since, self._was_up = None, True

    def remaining_s(self, now: float) -> float:
        """Return how long the outage lasts from now on, on average.

        It is the mean over the earlier outages that were longer than this one is so far, of the
        time that they took from this age on. One more outage, which lasts twice as long as this
        one has so far, is added to them: the longer an outage lasts, the longer it may still last.
        """
        elapsed_s = 0.0 if self._down_since is None else now - self._down_since
        longer = [outage_s for outage_s in self._outages_s if outage_s > elapsed_s]
        rest_s = math.fsum(outage_s - elapsed_s for outage_s in longer)
        assumed_s = max(MIN_WAIT_S, elapsed_s)
        return min((rest_s + assumed_s) / (len(longer) + 1), MAX_WAIT_S)
