"""Numbers of the requests that gateways send, so that each is in one queue only.

An engine publishes its queue, and with it which requests of each gateway the queue contains. A
gateway adds the requests that it has sent and that are not among them yet.

Requests travel over connections of their own, so an engine may accept them in another order than
they were numbered in. Some never arrive. So the engine tells the last number and which of the ones
right before it have come, as receivers of TCP and of IPsec do (RFC 2018, RFC 4303).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

SENT_FIELD: Final = "ragcache_sent"
"""Name of a request's number within its ``kv_transfer_params``."""

WINDOW: Final = 64
"""Numbers that are told apart. Earlier ones count as accepted."""

_MASK: Final = (1 << WINDOW) - 1
_MAX_NUMBER: Final = (1 << 63) - 1
_MAX_SENDER_CHARS: Final = 64


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request as its gateway names it to the engine.

    Attributes:
        sender: Random name of the gateway's client of this engine.
        number: Ascends from 1 for each sender.
        work_s: Predicted seconds of its load and its prefill; 0: not known.
        is_background: It has a low priority, so no question waits for it.
    """

    sender: str
    number: int
    work_s: float = 0.0
    is_background: bool = False

    def to_field(self) -> dict[str, Any]:
        """Return the value of ``SENT_FIELD``."""
        return {
            "sender": self.sender,
            "number": self.number,
            "work_s": self.work_s,
            "background": self.is_background,
        }

    @classmethod
    def from_field(cls, value: object) -> SentRequest | None:
        """Read the value of ``SENT_FIELD``. None: it is absent or not valid."""
        if not isinstance(value, dict):
            return None
        sender, number, work_s = value.get("sender"), value.get("number"), value.get("work_s")
        if not isinstance(sender, str) or not 0 < len(sender) <= _MAX_SENDER_CHARS:
            return None
        if type(number) is not int or not 0 < number <= _MAX_NUMBER:
            return None
        if not isinstance(work_s, int | float) or not math.isfinite(work_s) or work_s < 0:
            return None
        return cls(sender, number, float(work_s), value.get("background") is True)


@dataclass(frozen=True, slots=True)
class AcceptedNumbers:
    """Which requests of one sender an engine has accepted.

    Attributes:
        last: The highest number; 0: none was accepted.
        recent: Bit i tells whether ``last - i`` was accepted.
    """

    last: int = 0
    recent: int = 0

    def add(self, number: int) -> AcceptedNumbers:
        """Return the numbers with one more."""
        if number > self.last:
            shifted = self.recent << min(number - self.last, WINDOW)
            return AcceptedNumbers(number, (shifted | 1) & _MASK)
        behind = self.last - number
        return AcceptedNumbers(self.last, self.recent | (1 << behind) & _MASK)

    def __contains__(self, number: int) -> bool:
        behind = self.last - number
        return behind >= WINDOW or (behind >= 0 and bool(self.recent >> behind & 1))
