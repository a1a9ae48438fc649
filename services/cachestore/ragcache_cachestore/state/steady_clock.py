"""The monotonic clock in milliseconds, and what Unix times mean on it.

The wall clock of a machine may be wrong for a while and then jump. A store that remembers Unix
times would keep such an error for as long as it remembers them. So it remembers when something
happened on this clock, and converts the Unix times of others when it needs them. The conversion
asks how long ago they were, by the wall clock as it is then.
"""

from __future__ import annotations

from collections.abc import Callable


class SteadyClock:
    """Milliseconds that pass evenly. Only their differences have a meaning.

    Args:
        monotonic: Returns seconds of a clock that is never set.
        wall_ms: Returns the Unix time in milliseconds.
    """

    def __init__(self, monotonic: Callable[[], float], wall_ms: Callable[[], int]) -> None:
        self._monotonic = monotonic
        self._wall_ms = wall_ms

    def now_ms(self) -> int:
        """Return the time now."""
        return int(self._monotonic() * 1000)

    def of_unix(self, unix_ms: int) -> int:
        """Return when a Unix time was. One that is still to come counts as now."""
        # Read first: if this thread is interrupted in between, the result is too early, and a
        # computation counts as having seen fewer deletes.
        now_ms = self.now_ms()
        return now_ms - max(0, self._wall_ms() - unix_ms)

    def to_unix(self, at_ms: int) -> int:
        """Return the Unix time, by the wall clock as it is now, of a time on this clock."""
        return max(0, self._wall_ms() - (self.now_ms() - at_ms))
