"""Starts the loads of requests, and applies their outcomes to requests and cost predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ragcache_core.blend.token_selection import QUESTION_TOKENS
from ragcache_core.blend.variant_selection import Blend
from ragcache_core.cost.load_or_compute import ReuseCosts
from ragcache_core.identity.keys import VariantKey
from ragcache_core.store_api import StoredVariant
from ragcache_engine.protocol.messages import LoadJob, LoadOutcome, RecomputeJob
from ragcache_engine.scheduler.block_reservation import BlockReservation
from ragcache_engine.scheduler.load_planner import LoadPlanner
from ragcache_engine.scheduler.request import (
    RequestPhase,
    RequestState,
    blend_spans,
    exact_spans,
)
from ragcache_engine.scheduler.tier_map import TierMap


class LoadTracker:
    """Keeps a request's state in step with its load."""

    def __init__(self, costs: ReuseCosts, tiers: TierMap, planner: LoadPlanner) -> None:
        self._costs = costs
        self._tiers = tiers
        self._planner = planner

    def start(
        self,
        request_id: str,
        request: RequestState,
        load: tuple[int, int],
        blocks: tuple[int, ...],
        reservation: BlockReservation | None,
    ) -> LoadJob:
        """Record on a request that its load starts. Return the worker's job.

        Args:
            request_id: vLLM's id of the request.
            request: The request.
            load: Prompt tokens [first, end) to load.
            blocks: The request's block table.
            reservation: Where to allocate scratch blocks. None: there are none.
        """
        first, end = load
        request.left_to_recompute = request.recomputed_runs = ()
        request.previous_approximate_after = request.approximate_after
        blend, recompute = request.blend, None
        if blend is None or end <= blend.exact_end:
            spans = exact_spans(request, first, end)
        else:
            spans = blend_spans(blend, first, end)
            recompute = self._start_recompute(request_id, request, blend, load, reservation)
            request.missing_ranges = blend.missing_ranges(first, end, not_stored_only=True)
        request.spans = spans
        request.span_sources = self._tiers.sources(spans, request.stored or {})
        return LoadJob(
            request_id,
            spans,
            first,
            end,
            blocks,
            request.plan.domain,
            recompute,
            request.traceparent,
            compute_s=self._costs.predict_compute_s(end, len(request.token_ids) - end),
            deadline_s=self._planner.deadline_s(request, first, end),
            precision=request.plan.precision,
        )

    def finish(self, request: RequestState, outcome: LoadOutcome) -> None:
        """Apply the outcome of a request's load to the request and to the cost predictions."""
        if not request.plan.trial:
            observe_load(self._costs, self._tiers, outcome, request.loading, request.stored or {})
        if outcome.blended_tokens:
            self._costs.observe_selection(outcome.tokens, outcome.select_s)
        request.enter(RequestPhase.WAITING)
        request.left_to_recompute = request.recomputed_runs = outcome.left_to_recompute
        request.loaded_chunks, request.shifted_runs = outcome.loaded_chunks, outcome.shifted_runs
        if not request.recorded:
            missing = () if outcome.reason else (*request.missing_ranges, *outcome.missing_ranges)
            request.record.end_load(outcome, request.overlapping_segments(missing))
        if outcome.reason:
            # vLLM asks again after a failure. The same answer would repeat for ever.
            request.load_failed = True
            # vLLM computes what this load would have made approximate.
            request.approximate_after = request.previous_approximate_after
            if outcome.missing_variant is not None:
                request.mark_missing_from(outcome.missing_variant)

    def _start_recompute(
        self,
        request_id: str,
        request: RequestState,
        blend: Blend,
        load: tuple[int, int],
        reservation: BlockReservation | None,
    ) -> RecomputeJob | None:
        """Record which KV becomes approximate. Return None if this part of the blend is exact."""
        first, end = load
        exact_end = max(first, blend.exact_end)
        if exact_end >= end:
            return None
        if not request.recorded:
            request.record.miss = ""
        # KV that vLLM kept of an earlier load is as approximate as it was.
        previous = request.previous_approximate_after
        request.approximate_after = exact_end if previous is None else min(exact_end, previous)
        scratch: tuple[int, ...] = ()
        if blend.recompute_tokens and reservation is not None:
            tokens = min(len(request.token_ids) - end, QUESTION_TOKENS)
            scratch = reservation.allocate_scratch(request_id, tokens)
        return RecomputeJob(
            exact_end=exact_end,
            token_ids=request.token_ids,
            chunks=blend.influenced_chunks(end),
            missing=blend.missing_ranges(first, end),
            recompute_tokens=blend.recompute_tokens,
            scratch_blocks=scratch,
        )


def observe_load(
    costs: ReuseCosts,
    tiers: TierMap,
    outcome: LoadOutcome,
    variants: Sequence[VariantKey],
    stored: Mapping[VariantKey, StoredVariant],
) -> None:
    """Apply the duration of a load to the predictions of its tiers, unless it failed early.

    Args:
        variants: What was to be loaded.
        stored: The store's answer to the lookup.
    """
    if outcome.timed_out:
        costs.observe_timeout(tiers.remote_tiers(variants, stored), outcome.seconds)
    elif not outcome.reason:
        sizes = tiers.loaded_bytes_by_tier(outcome.bytes_by_tier, variants, stored)
        costs.observe_load(sizes, outcome.seconds)
