"""Compares contestants request by request, with intervals, for the JSON line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.support.sequences.bootstrap import (
    interval,
    mean_ratio,
    quantile_ratio,
    slower_share,
)
from bench.support.sequences.cap import ComputedTokens
from bench.support.sequences.turn_figures import Measured


def compare(
    measured: Mapping[str, Sequence[Measured]],
    plain: str,
    plain_again: str,
    caps: Mapping[str, float],
) -> dict[str, Any]:
    """Return ratios to plain vLLM with their 95 % intervals.

    Args:
        measured: The measured requests of each contestant, the same ones in the same order.
        plain: Name of the plain contestant.
        plain_again: Name of the second plain contestant. If it was measured, every ratio has both.
        caps: The cap of contestants that have one.
    """
    times = {name: np.array([one.ttft_s for one in found]) for name, found in measured.items()}
    first, again = times[plain], times.get(plain_again)
    reference = first if again is None else np.stack([first, again])
    count = len(first)
    everything = np.arange(count)
    figures: dict[str, Any] = {}
    intervals: dict[str, tuple[float, float]] = {}
    for name, found in times.items():
        if name in (plain, plain_again):
            continue

        statistics = {
            f"plain_over_{name}_mean": mean_ratio(reference, found),
            f"plain_over_{name}_p50": quantile_ratio(reference, found, 0.5),
            f"plain_over_{name}_p95": quantile_ratio(reference, found, 0.95),
            f"{name}_slower_share": slower_share(found, first, again),
        }
        for figure, statistic in statistics.items():
            figures[figure] = round(statistic(everything), 4)
            low, high = interval(statistic, count)
            intervals[figure] = (round(low, 4), round(high, 4))
        if (cap := caps.get(name)) is not None:
            mean = f"plain_over_{name}_mean"
            figures[f"{name}_gain_over_cap"] = round(figures[mean] / cap, 4)
            low, high = intervals[mean]
            intervals[f"{name}_gain_over_cap"] = (round(low / cap, 4), round(high / cap, 4))
    if again is not None:
        against_itself = mean_ratio(first, again)
        figures["plain_over_plain_again_mean"] = round(against_itself(everything), 4)
        low, high = interval(against_itself, count)
        intervals["plain_over_plain_again_mean"] = (round(low, 4), round(high, 4))
        figures["plain_slower_share"] = round(_share_against_itself(first, again), 4)
    return figures | {"intervals": intervals}


def caps_of(computed: ComputedTokens, ahead: ComputedTokens) -> dict[str, float]:
    """Return the cap of each of our contestants.

    Args:
        computed: Of the sequence.
        ahead: Of the sequence with chunks computed ahead.
    """
    return {
        "exact": computed.exact_cap,
        "blend": computed.blend_cap,
        "exact_ahead": ahead.exact_cap,
        "blend_ahead": ahead.blend_cap,
    }


def _share_against_itself(first: NDArray[np.float64], again: NDArray[np.float64]) -> float:
    everything = np.arange(len(first))
    one = slower_share(first, again, None)(everything)
    other = slower_share(again, first, None)(everything)
    return (one + other) / 2
