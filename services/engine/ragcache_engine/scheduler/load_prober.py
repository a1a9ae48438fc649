"""Asks the worker to measure loads that requests declined, so that their predictions recover.

A load that is predicted to be slower than computing is never made for a request. Without a
measurement one slow minute of a tier would rule it out for ever. So a request that has ended leaves
its declined load to the worker, which makes it once more while the engine has nothing else to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ragcache_core.cost.load_or_compute import ReuseCosts
from ragcache_core.identity.keys import VariantKey
from ragcache_core.store_api import StoredVariant
from ragcache_engine.protocol.messages import LoadJob, ProbeOutcome, RecomputeJob
from ragcache_engine.scheduler.block_reservation import BlockReservation
from ragcache_engine.scheduler.load_planner import LoadPlanner
from ragcache_engine.scheduler.load_tracker import observe_load
from ragcache_engine.scheduler.request import RequestState
from ragcache_engine.scheduler.tier_map import TierMap

NULL_BLOCK = 0
"""vLLM's placeholder in block tables. No request reads it, so a probe writes its values there."""


class LoadProber:
    """Makes the jobs that measure declined loads, and learns from their outcomes."""

    def __init__(self, costs: ReuseCosts, tiers: TierMap, planner: LoadPlanner) -> None:
        self._costs = costs
        self._tiers = tiers
        self._planner = planner
        # By request: where its lookup found the variants of its probe.
        self._stored: dict[str, Mapping[VariantKey, StoredVariant]] = {}

    def probe_job(
        self,
        request_id: str,
        request: RequestState,
        blocks: Sequence[int],
        reservation: BlockReservation,
    ) -> LoadJob | None:
        """Return the job that measures what a finished request declined, if it declined any.

        vLLM takes no step without a request. So the request's blocks are kept in the reservation,
        and vLLM goes on until the worker releases them.

        Args:
            request_id: vLLM's id of the request.
            request: The request.
            blocks: Its block table.
            reservation: Where to keep the blocks.
        """
        spans = request.decision.declined if request.decision is not None else ()
        if not spans or not blocks or not reservation.keep(request_id, len(blocks)):
            return None
        stored = request.stored or {}
        self._stored[request_id] = {
            span.variant: stored[span.variant] for span in spans if span.variant in stored
        }
        first, end = spans[0].start, spans[-1].end
        # Of a blend, a value that does not arrive ends no load.
        is_blend = any(span.position_shift or span.fix_overhead for span in spans)
        return LoadJob(
            request_id,
            spans,
            first,
            end,
            (NULL_BLOCK,) * reservation.num_blocks(end),
            request.plan.domain,
            RecomputeJob(first, (), (), (), 0, ()) if is_blend else None,
            deadline_s=self._planner.deadline_s(request, first, end),
            precision=request.plan.precision,
        )

    def observe(self, probe: ProbeOutcome) -> None:
        """Apply the outcome of a probe to the predictions of its tiers."""
        stored = self._stored.get(probe.outcome.request_id, {})
        observe_load(self._costs, self._tiers, probe.outcome, probe.variants, stored)

    def forget(self, request_id: str) -> None:
        """Forget a probe whose request's blocks vLLM has back."""
        self._stored.pop(request_id, None)
