"""What a recomputed token costs beside one of an ordinary prefill, from requests of one run.

All fits are Theil-Sen lines: the median slope between pairs of requests, so that single slow
requests do not move them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.support.sequences.turn_figures import Measured

_FEWEST = 5
_LEAST_DISTANCE_TOKENS = 16
"""Pairs of requests closer than this say nothing about a slope."""


@dataclass(frozen=True, slots=True)
class CostLine:
    """Milliseconds over tokens: a fixed part, and a part for each token."""

    fixed_ms: float
    ms_per_token: float

    def at(self, tokens: float) -> float:
        """Return the milliseconds at a number of tokens."""
        return self.fixed_ms + self.ms_per_token * tokens


def fit_line(tokens: Sequence[float], milliseconds: Sequence[float]) -> CostLine | None:
    """Return the Theil-Sen line, or None with too few points that differ."""
    x, y = np.asarray(tokens, dtype=float), np.asarray(milliseconds, dtype=float)
    if len(x) < _FEWEST:
        return None
    first, second = np.triu_indices(len(x), 1)
    distance = x[second] - x[first]
    apart = np.abs(distance) >= _LEAST_DISTANCE_TOKENS
    if apart.sum() < _FEWEST:
        return None
    slope = float(np.median((y[second] - y[first])[apart] / distance[apart]))
    return CostLine(float(np.median(y - slope * x)), slope)


def recompute_costs(
    blend: Sequence[Measured], prefills: Sequence[Measured]
) -> dict[str, float | str | None]:
    """Compare the cost of blended requests with that of prefills in plain vLLM.

    The prefill line is plain vLLM's time to first token over its computed tokens. For the blend
    line the time to load values is subtracted from the time to first token of each blended
    request. It stands over recomputed and computed tokens. Both have the same server around them,
    so ``blend_fixed_ms`` is the difference of their fixed parts. It includes the lookup and the
    extra engine steps.

    Args:
        blend: Requests of a ``blend`` contestant.
        prefills: Requests of plain vLLM of many lengths, after a cached prefix.
    """
    blended = [one for one in blend if one.blended]
    processed = [one.processed_tokens for one in blended]
    without_load_ms = [(one.ttft_s - one.seconds_by_stage()["load"]) * 1e3 for one in blended]
    prefill = fit_line(
        [one.computed_tokens for one in prefills], [one.ttft_s * 1e3 for one in prefills]
    )
    blending = fit_line(processed, without_load_ms)
    stage = fit_line(
        [one.record["recomputed_tokens"] for one in blended],
        [one.record["recompute_s"] * 1e3 for one in blended],
    )
    found: dict[str, float | str | None] = {
        "recompute_ms_per_token_over_prefill": None,
        "blend_fixed_ms": None,
        "blend_excess_ms_p50": None,
        **_shown("prefill", prefill),
        **_shown("blend", blending),
        **_shown("recompute_stage", stage),
        "fitted": "Theil-Sen lines: ttft less load over recomputed + computed tokens of blended "
        "requests, and ttft over computed tokens of plain vLLM after a cached prompt; "
        "the excess is over the prefill line",
    }
    if prefill and prefill.ms_per_token > 0 and blended:
        excess_ms = np.array(without_load_ms) - [prefill.at(count) for count in processed]
        found["blend_excess_ms_p50"] = round(float(np.median(excess_ms)), 2)
        if blending:
            ratio = blending.ms_per_token / prefill.ms_per_token
            found["recompute_ms_per_token_over_prefill"] = round(ratio, 3)
            found["blend_fixed_ms"] = round(blending.fixed_ms - prefill.fixed_ms, 2)
    return found


def _shown(name: str, line: CostLine | None) -> dict[str, float | None]:
    return {
        f"{name}_line_ms_per_token": None if line is None else round(line.ms_per_token, 4),
        f"{name}_line_fixed_ms": None if line is None else round(line.fixed_ms, 2),
    }
