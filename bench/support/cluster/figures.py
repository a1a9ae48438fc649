"""Figures of contestants that chose engines differently."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.support.cluster.open_loop import TIMEOUT_S, Answered
from bench.support.cluster.rivals import RIVALS
from bench.support.comparison import interval, quantile_ratio

OURS: Final = "ours"


def first_times(answers: Sequence[Answered]) -> NDArray[np.float64]:
    """Return the times to the first token; a failed request has the longest one."""
    return np.minimum([one.first_s for one in answers], TIMEOUT_S)


def ratios(found: Mapping[str, Sequence[Answered]], slo_s: float) -> dict[str, Any]:
    """Return the quotients of each rival over ours, with intervals of those of times."""
    firsts = {name: first_times(answers) for name, answers in found.items()}
    ours = firsts[OURS]
    figures: dict[str, Any] = {}
    for name in RIVALS:
        for percent in (50, 90):
            ratio = quantile_ratio(firsts[name], ours, percent / 100)
            key = f"ttft_p{percent}_{name}_over_ours"
            figures[key] = round(ratio(np.arange(len(ours))), 3)
            low, high = interval(ratio, len(ours))
            figures[f"{key}_interval"] = [round(low, 3), round(high, 3)]
        good = [(firsts[one] <= slo_s).sum() for one in (name, OURS)]
        figures[f"goodput_{name}_over_ours"] = round(float(good[0] / max(1, good[1])), 3)
    return figures


def summary(answers: Sequence[Answered], slo_s: float) -> dict[str, float]:
    """Return what a contestant's requests took, and how much of their prompts was reused."""
    times = first_times(answers)
    caches = [one.details["cache"] for one in answers if one.details]
    prompt = sum(one["prompt_tokens"] or 0 for one in caches) or math.nan
    return {
        "ttft_p50_s": round(float(np.quantile(times, 0.5)), 4),
        "ttft_p90_s": round(float(np.quantile(times, 0.9)), 4),
        "within_slo": round(float((times <= slo_s).mean()), 4),
        "local_share": round(sum(one["local_tokens"] or 0 for one in caches) / prompt, 4),
        "loaded_share": round(sum(one["loaded_tokens"] or 0 for one in caches) / prompt, 4),
        "prompt_tokens": round(prompt / max(1, len(caches))),
        "mean_wait_s": round(statistics.fmean(one.wait_s for one in answers if one.details), 4),
        "prediction_error_median": error_median(answers),
        "outside_engine_p50_s": round(statistics.median(one.outside_s for one in answers), 4),
        "failed": sum(bool(one.error) for one in answers),
    }


def error_median(answers: Sequence[Answered]) -> float:
    """Return the median of the known prediction errors."""
    errors = [one.prediction_error for one in answers if one.details]
    return round(
        statistics.median([error for error in errors if error is not None] or [math.nan]), 4
    )


def max_wait_over_mean(answers: Sequence[Answered]) -> tuple[float, float]:
    """Return the longest mean wait of an engine over the mean of all requests.

    Also returns what it is on average if the same waits are dealt to engines by chance.
    """
    known = [one for one in answers if one.details]
    _, engines = np.unique([one.engine for one in known], return_inverse=True)
    waits = np.array([one.wait_s for one in known])
    counts, rng = np.bincount(engines), np.random.default_rng(0)

    def ratio(dealt: NDArray[np.float64]) -> float:
        means = np.bincount(engines, weights=dealt) / counts
        return float(means.max() / max(dealt.mean(), 1e-9))

    by_chance = [ratio(rng.permutation(waits)) for _ in range(200)]
    return round(ratio(waits), 3), round(statistics.fmean(by_chance), 3)
