"""Compares eviction and admission policies on fixed sequences, at 1 to 50 % of the footprint.

Each sequence has two halves: settings were tuned on the first, figures are of the second. It starts
with an empty tier. The classes are those that the
store runs. Modes: ``exact`` has nodes of a knowledge tree, where a hit needs all parents and only
leaves are evicted; ``blend`` treats each chunk by itself.

``gap_closed`` is the share of the gap between LRU and a clairvoyant policy that may leave chunks
unstored (``bench.support.clairvoyant``), in saved prefill seconds. For each sequence and mode the
gaps of all capacities are added before dividing, so that narrow gaps add no noise. Then sequences
and modes count alike. A pair in which an infinite tier saves less than 1 % is left out.
``online_bound_gap_closed`` is what a policy that does not know later requests can close at most
(``bench.support.hazard_bound``). ``with_lookahead`` is what the default closes if LOOKAHEAD later
requests wait in a queue, and the store holds what they need as it does for an engine's queue.
``pgdsf_over_*`` are ratios of the saved share of prefill seconds in ``exact``, as the geometric
mean over sequences.

On retrieved and generated sequences (``--quick``) PGDSF saves less than LFU because of its clock:
without formula 3 (``pgdsf without clock``) it saves more. An eviction ranks later uses above
earlier ones, as LRU does, which costs popular chunks their rank while popularity is stable. In
Mooncake's conversations popularity changes. There PGDSF saves more than LFU, in large tiers due to
the clock.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Hashable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bench.support.clairvoyant import Intervals, clairvoyant
from bench.support.comparison_policies import POLICY_NAMES, make_policy
from bench.support.hazard_bound import hazard_bounds
from bench.support.program import options, rounded
from bench.support.traces import DATA, Replay, Tally, Trace, load_traces
from ragcache_core.eviction import DEFAULT_POLICY, EvictionPolicy
from ragcache_core.eviction.admission import ADMISSION_NAMES, default_admission, make_admission
from ragcache_core.eviction.pgdsf import PrefixAwareGreedyDualSizeFrequency

CAPACITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
QUICK_CAPACITIES = (0.01, 0.05, 0.2, 0.5)
SMALLEST_GAP_SHARE = 0.01  # smallest share that an infinite tier must save
LOOKAHEAD = 32
"""Requests that wait in the queue of a busy engine."""
WITHOUT_CLOCK = "pgdsf without clock"
K = TypeVar("K", bound=Hashable)

Runs = dict[str, list[Tally]]
"""By name of a policy, or of an admission with the default policy: one tally per capacity."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a sequence in a mode. Lists are by capacity.

    Attributes:
        trace: The sequence.
        policies: Of every policy.
        admissions: Of every admission.
        lookahead: Of the default policy with a queue of LOOKAHEAD requests.
        best_by_compute: The clairvoyant's shares of seconds.
        bound_by_compute: Shares that no choice exceeds.
        online_bound_by_compute: Shares that no policy exceeds which does not know later requests.
        infinite_by_compute: The share of an infinite tier.
    """

    trace: Trace
    policies: Runs
    admissions: Runs
    lookahead: list[Tally]
    best_by_compute: list[float]
    bound_by_compute: list[float]
    online_bound_by_compute: list[float]
    infinite_by_compute: float


class WithoutClock(PrefixAwareGreedyDualSizeFrequency[K]):
    """PGDSF by Frequency * Cost / Size alone, to show the effect of its clock."""

    def _on_evicted(self, key: K, state: Any, priority: float) -> None:
        super()._on_evicted(key, state, priority)
        self._clock = 0.0


def replay(trace: Trace, policy: str, admission: str, share: float, lookahead: int = 0) -> Tally:
    leaves_only = trace.exact
    made: EvictionPolicy[int] = (
        WithoutClock(leaves_only=leaves_only)
        if policy == WITHOUT_CLOCK
        else make_policy(policy, leaves_only=leaves_only)
    )
    capacity_bytes = int(trace.footprint_bytes() * share)
    admits = make_admission(admission, made)
    return Replay(made, admits, capacity_bytes, lookahead).run(trace)


def measure(trace: Trace, capacities: Sequence[float]) -> Result:
    """Replay every policy, every admission, and the clairvoyant."""
    intervals = Intervals(trace)
    policies: Runs = {
        name: [replay(trace, name, "always", share) for share in capacities]
        for name in (*POLICY_NAMES, WITHOUT_CLOCK)
    }
    admissions: Runs = {
        name: policies[DEFAULT_POLICY]
        if name == "always"
        else [replay(trace, DEFAULT_POLICY, name, share) for share in capacities]
        for name in ADMISSION_NAMES
    }
    admission = default_admission(leaves_only=trace.exact)
    lookahead = [replay(trace, DEFAULT_POLICY, admission, one, LOOKAHEAD) for one in capacities]
    cost_s = policies["lru"][0].cost_s
    footprint = trace.footprint_bytes()
    by_compute = [
        clairvoyant(intervals, intervals.cost_s, int(footprint * share)) for share in capacities
    ]
    best = [choice.gain / cost_s for choice in by_compute]
    online = hazard_bounds(trace, [int(footprint * share) for share in capacities])
    return Result(
        trace=trace,
        policies=policies,
        admissions=admissions,
        lookahead=lookahead,
        best_by_compute=best,
        bound_by_compute=[choice.bound / cost_s for choice in by_compute],
        online_bound_by_compute=[min(pair) for pair in zip(online, best, strict=True)],
        infinite_by_compute=float(intervals.cost_s.sum()) / cost_s,
    )


def gap_closed(results: Sequence[Result], runs: Sequence[Sequence[Tally]]) -> float:
    """Return the mean share of the gap to the clairvoyant, in saved prefill seconds.

    The mean is over sequences and modes; each gap is that of all capacities.
    """
    saved = [[tally.by_compute for tally in tallies] for tallies in runs]
    return share_of_gap(results, saved)


def share_of_gap(results: Sequence[Result], saved: Sequence[Sequence[float]]) -> float:
    """Return the same from the saved shares of prefill seconds, by capacity."""
    shares = []
    for result, ours in zip(results, saved, strict=True):
        lru = sum(tally.by_compute for tally in result.policies["lru"])
        shares.append((sum(ours) - lru) / (sum(result.best_by_compute) - lru))
    return statistics.mean(shares)


def admission_gap_closed(results: Sequence[Result]) -> dict[str, float]:
    """Return the mean gap closed by the default policy with each admission."""
    return {
        name: gap_closed(results, [result.admissions[name] for result in results])
        for name in ADMISSION_NAMES
    }


def ratio(results: Sequence[Result], above: str, below: str) -> float:
    """Return the saved prefill seconds of one policy over another in ``exact``."""
    return statistics.geometric_mean(
        statistics.mean(tally.by_compute for tally in result.policies[above])
        / statistics.mean(tally.by_compute for tally in result.policies[below])
        for result in results
        if result.trace.exact
    )


def summary(results: Sequence[Result], capacities: Sequence[float]) -> dict[str, Any]:
    """Return the JSON object; see the module."""
    told = [result for result in results if result.infinite_by_compute >= SMALLEST_GAP_SHARE]
    by_policy = {
        name: gap_closed(told, [result.policies[name] for result in told]) for name in POLICY_NAMES
    }
    by_default = [
        result.admissions[default_admission(leaves_only=result.trace.exact)] for result in told
    ]
    return {
        "default_policy": DEFAULT_POLICY,
        "default_admission": {
            "exact": default_admission(leaves_only=True),
            "blend": default_admission(leaves_only=False),
        },
        "gap_closed": rounded(by_policy),
        "default_gap_closed": round(gap_closed(told, by_default), 4),
        "with_lookahead": round(gap_closed(told, [result.lookahead for result in told]), 4),
        "online_bound_gap_closed": round(
            share_of_gap(told, [result.online_bound_by_compute for result in told]), 4
        ),
        "pgdsf_over_lru": round(ratio(told, "pgdsf", "lru"), 3),
        "pgdsf_over_lfu": round(ratio(told, "pgdsf", "lfu"), 3),
        "pgdsf_without_clock_over_lfu": round(ratio(told, WITHOUT_CLOCK, "lfu"), 3),
        "pgdsf_over_gdsf": round(ratio(told, "pgdsf", "gdsf"), 3),
        "pgdsf_ratios_of": "share of prefill seconds saved, exact mode",
        "admission_gap_closed": {
            "exact": rounded(admission_gap_closed([one for one in told if one.trace.exact])),
            "blend": rounded(admission_gap_closed([one for one in told if not one.trace.exact])),
        },
        "admission_written_bytes": rounded(written(told)),
        "best_named_policy": max(by_policy, key=by_policy.__getitem__),
        "clairvoyant_beaten": beaten(results),
        "clairvoyant_over_bound": round(
            statistics.mean(
                best / bound
                for result in told
                for best, bound in zip(result.best_by_compute, result.bound_by_compute, strict=True)
            ),
            4,
        ),
        "capacities": list(capacities),
        "sequences": [label(result.trace) for result in told],
        "left_out": [label(result.trace) for result in results if result not in told],
    }


def written(results: Sequence[Result]) -> dict[str, float]:
    """Return bytes written under each admission, as a share of those under ``always``."""
    return {
        name: statistics.mean(
            ours.written_bytes / all_of_it.written_bytes
            for result in results
            for ours, all_of_it in zip(
                result.admissions[name], result.admissions["always"], strict=True
            )
        )
        for name in ADMISSION_NAMES
    }


def beaten(results: Sequence[Result]) -> int:
    """Count runs that saved more than the clairvoyant, whose choice was then not the best."""
    return sum(
        tally.by_compute > best + 1e-9
        for result in results
        for tallies in (*result.policies.values(), *result.admissions.values(), result.lookahead)
        for tally, best in zip(tallies, result.best_by_compute, strict=True)
    )


def label(trace: Trace) -> str:
    return f"{trace.name}/{'exact' if trace.exact else 'blend'}"


def main() -> None:
    parser = options(__doc__, "without the largest sequence")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the public data")
    given = parser.parse_args()
    capacities = QUICK_CAPACITIES if given.quick else CAPACITIES
    traces = load_traces(given.data, given.quick)
    with ProcessPoolExecutor() as pool:
        # The largest come last in both modes; start with them.
        runs = [pool.submit(measure, trace.second_half(), capacities) for trace in reversed(traces)]
        results = [run.result() for run in reversed(runs)]
    print(json.dumps(summary(results, capacities)))


if __name__ == "__main__":
    main()
