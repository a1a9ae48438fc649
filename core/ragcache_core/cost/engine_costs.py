"""What prefills and loads take in one engine, as it reports it, and how long requests wait."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ragcache_core.cost.prefill_profile import PrefillProfile

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


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Measured costs of one engine.

    Attributes:
        profile: Seconds of passes.
        correction: Measured seconds of recent passes, divided by those of the profile.
        loads: Latency in seconds and bytes per second of each tier with enough loads.
    """

    profile: PrefillProfile
    correction: float = 1.0
    loads: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def compute_s(self, cached: int, computed: int) -> float:
        """Return the predicted seconds to compute tokens after cached ones."""
        return self.correction * self.profile.predict(cached, computed) if computed > 0 else 0.0

    def load_s(self, tier: str, num_bytes: int) -> float:
        """Return the predicted seconds of one load.

        A tier without enough loads counts as free, so that it is measured.
        """
        if not num_bytes or tier not in self.loads:
            return 0.0
        latency_s, bytes_per_s = self.loads[tier]
        return latency_s + num_bytes / bytes_per_s

    def loads_faster(self, tier: str, token_bytes: float, token_s: float) -> bool:
        """Tell whether a tier delivers tokens faster than the engine computes them.

        Source: Mooncake section 2.2, equation 2.

        Args:
            token_bytes: Bytes of one token's KV.
            token_s: Seconds to compute one token.
        """
        if tier not in self.loads:
            return True
        return token_bytes <= token_s * self.loads[tier][1]
