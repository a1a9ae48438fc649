"""What prefills and loads take in one engine, as it reports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ragcache_core.cost.prefill_profile import PrefillProfile


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Measured costs of one engine.

    Attributes:
        profile: Seconds of passes.
        correction: Measured seconds of recent passes, divided by those of the profile.
        loads: Latency in seconds and bytes per second of each tier with enough loads.
        request_s: Seconds that a request takes in the engine besides its loads and passes.
    """

    profile: PrefillProfile
    correction: float = 1.0
    loads: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    request_s: float = 0.0

    def prefill_s(self, cached: int, computed: int) -> float:
        """Return the predicted seconds from the first pass of a request to its first token."""
        return self.request_s + self.compute_s(cached, computed)

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
