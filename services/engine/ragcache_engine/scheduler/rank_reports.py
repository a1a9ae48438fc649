"""Merges the reports of an engine's ranks, so that the scheduler counts each event once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ragcache_core.blend.token_selection import merge_runs
from ragcache_core.identity.keys import VariantKey
from ragcache_engine.protocol.messages import LoadOutcome, ProbeOutcome, StepReport, TierChange


class RankReports:
    """Waits for all ranks where each of them has a part.

    A load ends when it has ended on all ranks, and a tier stores a variant when it does on all of
    them. Passes and probes are measured by rank 0: a pass takes all ranks equally long.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ended: dict[str, dict[int, LoadOutcome]] = defaultdict(dict)
        self._outcomes: dict[str, dict[int, LoadOutcome]] = defaultdict(dict)
        self._tiers: dict[VariantKey, dict[int, TierChange]] = {}

    def merge(self, reports: Iterable[StepReport]) -> StepReport:
        """Return what the ranks' reports of one step mean for the engine."""
        merged = StepReport()
        changes: dict[VariantKey, TierChange | None] = {}
        for report in sorted(reports, key=lambda one: one.rank):
            if report.rank == 0:
                merged.passes = report.passes
                merged.probes = [self._of_all_ranks(probe) for probe in report.probes]
            merged.ended_loads += self._complete(self._ended, report.rank, report.ended_loads)
            ended = self._complete(self._outcomes, report.rank, report.outcomes)
            for outcome in ended:
                # Of a request that was cancelled when only some ranks had loaded.
                self._ended.pop(outcome.request_id, None)
            merged.outcomes += ended
            changes |= self._tier_changes(report.rank, report.tier_changes)
        merged.tier_changes = changes
        return merged

    def _of_all_ranks(self, probe: ProbeOutcome) -> ProbeOutcome:
        """Return a probe with the bytes of all ranks, whose parts are as large as rank 0's."""
        one, count = probe.outcome, self._num_ranks
        sizes = {tier: count * size for tier, size in one.bytes_by_tier.items()}
        outcome = replace(one, num_bytes=count * one.num_bytes, bytes_by_tier=sizes)
        return replace(probe, outcome=outcome)

    def _complete(
        self,
        waiting: dict[str, dict[int, LoadOutcome]],
        rank: int,
        outcomes: Sequence[LoadOutcome],
    ) -> list[LoadOutcome]:
        """Add a rank's outcomes; return those that no rank has left to report."""
        complete = []
        for outcome in outcomes:
            by_rank = waiting[outcome.request_id]
            by_rank[rank] = outcome
            if len(by_rank) == self._num_ranks:
                del waiting[outcome.request_id]
                complete.append(merge_outcomes([by_rank[one] for one in sorted(by_rank)]))
        return complete

    def _tier_changes(
        self, rank: int, changes: Mapping[VariantKey, TierChange | None]
    ) -> dict[VariantKey, TierChange | None]:
        """Apply a rank's changes; return those that change where all ranks store a variant."""
        changed: dict[VariantKey, TierChange | None] = {}
        for key, change in changes.items():
            by_rank = self._tiers.setdefault(key, {})
            was_complete = len(by_rank) == self._num_ranks
            if change is None:
                by_rank.pop(rank, None)
            else:
                by_rank[rank] = change
            if len(by_rank) == self._num_ranks:
                slowest = by_rank[min(by_rank)]
                is_exact = all(one.exact for one in by_rank.values())
                changed[key] = replace(slowest, exact=is_exact)
            elif was_complete:
                changed[key] = None
            if not by_rank:
                del self._tiers[key]
        return changed


def merge_outcomes(outcomes: Sequence[LoadOutcome]) -> LoadOutcome:
    """Return the outcome of a load that the ranks shared.

    What one rank misses is missing. Bytes add up, and seconds are those of the slowest rank.

    Args:
        outcomes: By rank, of one request.
    """
    first = outcomes[0]
    # What comes first in the prompt ends the load of all.
    failed = [one for one in outcomes if one.reason]
    worst = min(failed, key=lambda one: one.tokens, default=first)
    num_bytes: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    for one in outcomes:
        num_bytes.update(one.bytes_by_tier)
        missing |= Counter(one.missing_reasons)
    return replace(
        worst,
        tokens=min(one.tokens for one in outcomes),
        num_bytes=sum(one.num_bytes for one in outcomes),
        seconds=max(one.seconds for one in outcomes),
        missing_ranges=merge_runs([run for one in outcomes for run in one.missing_ranges]),
        recompute_s=max(one.recompute_s for one in outcomes),
        select_s=max(one.select_s for one in outcomes),
        missing_reasons=missing,
        timed_out=any(one.timed_out for one in outcomes),
        values_by_tier=first.values_by_tier,
        bytes_by_tier=num_bytes,
    )
