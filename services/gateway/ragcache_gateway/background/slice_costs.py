"""What a slice of a prefill costs in an engine, and how long slices should be."""

from __future__ import annotations

import contextlib

from ragcache_core.background.idle_gaps import slice_tokens
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.errors import RagCacheError
from ragcache_gateway.engines.client import Engine
from ragcache_gateway.engines.engine_load import profile_of
from ragcache_wire.v1 import engine_pb2

UNKNOWN_STEP_TOKENS = 512
"""Assumed tokens of an engine step if the engine does not report them. Few engines have fewer
(vLLM's default is 2,048 or more), and a smaller step costs only more requests."""

STEP_SHARE = 2
"""Without a profile, a slice has one part in this many of an engine step's tokens."""

_FIRST_REQUEST_S = 0.01
_MAX_REQUEST_S = 0.05
_WEIGHT = 0.1


class SliceCosts:
    """Predicts the time of slices, and learns the time of a request besides its pass."""

    def __init__(self) -> None:
        self._profile: PrefillProfile | None = None
        self._correction = 1.0
        self._request_s = _FIRST_REQUEST_S
        self.num_tokens = UNKNOWN_STEP_TOKENS // STEP_SHARE

    async def refresh(self, engine: Engine, cached: int) -> None:
        """Fetch the costs of the engine that computes next, and choose the length of slices.

        Args:
            cached: Tokens before a slice, on average.
        """
        costs = engine_pb2.Costs()
        with contextlib.suppress(RagCacheError):
            costs = await engine.costs()
        self._profile = profile_of(costs.prefill)
        self._correction = costs.correction or 1.0
        if self._profile is None:
            step_tokens = costs.prefill.pass_tokens or UNKNOWN_STEP_TOKENS
            self.num_tokens = max(1, step_tokens // STEP_SHARE)
        else:
            request_s = self._request_s / self._correction
            self.num_tokens = slice_tokens(self._profile, request_s, cached)

    def predict_s(self, cached: int, computed: int) -> float:
        """Return the time of a slice; 0 if nothing is known."""
        if self._profile is None:
            return 0.0
        return self._request_s + self._correction * self._profile.predict(cached, computed)

    def observe(self, cached: int, computed: int, seconds: float) -> None:
        """Learn from the measured time of a slice."""
        if self._profile is not None:
            rest_s = seconds - self._correction * self._profile.predict(cached, computed)
            request_s = min(_MAX_REQUEST_S, max(0.0, rest_s))
            self._request_s += _WEIGHT * (request_s - self._request_s)
