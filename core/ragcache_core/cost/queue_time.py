"""How long the latest requests waited in an engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

HALF_LIFE_S: Final = 2.0
"""Time after which a measured queue counts half: without further requests a queue empties."""

_WEIGHT: Final = 0.3


@dataclass(slots=True)
class QueueTime:
    """Moving mean of the time that requests waited, in seconds. It decays without requests.

    Times are those of a monotonic clock, in seconds.
    """

    mean_s: float = 0.0
    measured_at: float = 0.0

    def observe(self, waited_s: float, now_s: float) -> None:
        """Add the time that one request waited."""
        before_s = self.seconds(now_s)
        self.mean_s = before_s + _WEIGHT * (waited_s - before_s)
        self.measured_at = now_s

    def seconds(self, now_s: float) -> float:
        """Return how long a request that comes now is expected to wait."""
        return self.mean_s * math.exp2((self.measured_at - now_s) / HALF_LIFE_S)
