"""What callers have used, and the windows of time that it is counted in.

Windows are those of the calendar in UTC: a minute, a day, a month. So every gateway knows the same
window without asking another one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final, Self


class Period(StrEnum):
    """A window of the calendar."""

    MINUTE = "minute"
    DAY = "day"
    MONTH = "month"


_DAYS: Final = timedelta(days=1)
_LONGEST_MONTH: Final = timedelta(days=31)


def window_start(period: Period, unix_s: float) -> int:
    """Return the Unix time at which the window of a time began."""
    at = datetime.fromtimestamp(unix_s, UTC).replace(second=0, microsecond=0)
    match period:
        case Period.MINUTE:
            return int(at.timestamp())
        case Period.DAY:
            return int(at.replace(hour=0, minute=0).timestamp())
        case Period.MONTH:
            return int(at.replace(day=1, hour=0, minute=0).timestamp())


def window_end(period: Period, unix_s: float) -> int:
    """Return the Unix time at which the window of a time ends, and the next one begins."""
    start = datetime.fromtimestamp(window_start(period, unix_s), UTC)
    match period:
        case Period.MINUTE:
            end = start + timedelta(minutes=1)
        case Period.DAY:
            end = start + _DAYS
        case Period.MONTH:
            end = (start + _LONGEST_MONTH).replace(day=1)
    return int(end.timestamp())


@dataclass(frozen=True, slots=True)
class UsageCounts:
    """Requests and their tokens.

    Attributes:
        requests: That were let in.
        refusals: Answered with 429, for any reason.
        computed_tokens: Of prompts, that engines computed.
        cached_tokens: Of prompts, that engines had in their own prefix cache.
        loaded_tokens: Of prompts, that engines loaded from the cache store and used as they were.
        recomputed_tokens: Of prompts, that engines loaded for a blend and computed again.
        output_tokens: Of answers.
    """

    requests: int = 0
    refusals: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Self) -> UsageCounts:
        return UsageCounts(*(getattr(self, one) + getattr(other, one) for one in COUNT_NAMES))

    def __bool__(self) -> bool:
        return any(getattr(self, one) for one in COUNT_NAMES)

    def priced_tokens(self, cached_token_price: float) -> float:
        """Return the tokens as quotas count them.

        Args:
            cached_token_price: What a cached or loaded token counts, where a computed one counts 1.
        """
        reused = self.cached_tokens + self.loaded_tokens
        full = self.computed_tokens + self.recomputed_tokens + self.output_tokens
        return full + cached_token_price * reused


COUNT_NAMES: Final = tuple(one.name for one in fields(UsageCounts))
"""Fields of UsageCounts, in their order. Columns and messages have the same names."""

NOTHING_USED: Final = UsageCounts()
