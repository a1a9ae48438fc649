"""The slots that one tenant or key has, and when its next one is free."""

from __future__ import annotations

import time
from collections.abc import Callable

from ragcache_core.cost.retry_after import SlotForecast


class HeldSlots:
    """The slots of one owner. For one event loop.

    The wait of a refused request follows from the owner's own requests alone, so those of others
    neither shorten nor lengthen it.

    Args:
        clock: Returns seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._forecast = SlotForecast()
        self.count = 0
        self._sum_started = 0.0

    def take(self) -> float:
        """Count one more slot; return the time at which it was taken."""
        now = self._clock()
        self.count += 1
        self._sum_started += now
        return now

    def give_back(self, started: float) -> None:
        """Count the end of the request that took a slot at this time."""
        now = self._clock()
        self.count -= 1
        self._sum_started = self._sum_started - started if self.count else 0.0
        self._forecast.record(now, now - started)

    def promise_s(self) -> float:
        """Promise a refused request the owner's next slot; return the seconds until then."""
        now = self._clock()
        mean_age_s = now - self._sum_started / self.count if self.count else 0.0
        return self._forecast.promise_slot_s(now, self.count, mean_age_s)
