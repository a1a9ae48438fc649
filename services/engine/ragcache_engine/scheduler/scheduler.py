"""The connector's scheduler half: follows each request through vLLM's calls."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ragcache_core.cost.load_or_compute import ReuseCosts
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.store_api import REUSE, VariantUse
from ragcache_engine.protocol.context import EngineContext
from ragcache_engine.protocol.messages import (
    BLEND_UNSUPPORTED,
    ComputedRange,
    LoadJob,
    LoadOutcome,
    ObserveJob,
    PromptSlice,
    SaveJob,
    StepJobs,
    StepReport,
)
from ragcache_engine.scheduler.block_reservation import BlockPool, BlockReservation
from ragcache_engine.scheduler.load_planner import LoadPlanner
from ragcache_engine.scheduler.load_prober import LoadProber
from ragcache_engine.scheduler.load_publisher import ArrivedRequest, LoadPublisher
from ragcache_engine.scheduler.load_tracker import LoadTracker
from ragcache_engine.scheduler.lookup import LookupExecutor
from ragcache_engine.scheduler.lookup_completion import LookupCompletion
from ragcache_engine.scheduler.rank_reports import RankReports
from ragcache_engine.scheduler.request import NewRequest, RequestPhase, RequestState
from ragcache_engine.scheduler.request_intake import RequestIntake
from ragcache_engine.scheduler.save_planner import SavePlanner, observe_job
from ragcache_engine.scheduler.tier_map import TierMap
from ragcache_engine.scheduler.waiting_requests import HOLD_S, WaitingRequests
from ragcache_engine.telemetry.load_counts import LoadCounts
from ragcache_engine.telemetry.request_records import RequestRecord, RequestRecords
from ragcache_engine.telemetry.segment_outcomes import segment_outcomes
from ragcache_engine.use_reporter import COMPUTED, PREFIX_CACHE, UseReporter
from ragcache_engine.vllm_interface.arrivals import arrival_counter
from ragcache_kv.store_client.sharded import ShardedStore

if TYPE_CHECKING:
    from ragcache_engine.announcements.node_announcer import NodeAnnouncer
    from ragcache_engine.telemetry.engine_feed import EngineFeed
    from ragcache_engine.vllm_interface.block_events import PrefixCacheEvents

log = logging.getLogger("vllm.ragcache")


@dataclass(slots=True)
class _StepWork:
    """What the requests of one step add up to. ``attended``: tokens times the tokens before."""

    saves: list[SaveJob] = field(default_factory=list)
    computed: list[ComputedRange] = field(default_factory=list)
    joint: list[PromptSlice] = field(default_factory=list)
    num_tokens: int = 0
    prompt_tokens: int = 0
    recompute_tokens: int = 0
    attended: int = 0


class ConnectorScheduler:
    """Decides what to load and to save. There is one per engine.

    vLLM's scheduler thread calls all methods. None of them waits long, and no exception leaves
    them, because vLLM ends the engine on one.

    Args:
        engine: The engine and its model.
        records: Where to put the records of requests.
        client: The store.
        costs: Predictions of loads and computations, which this class keeps up to date.
        announcer: Tells gateways what the engine's caches have. None: they are not told.
        feed: Tells gateways what the engine has to do. None: they are not told.
    """

    def __init__(
        self,
        engine: EngineContext,
        records: RequestRecords,
        client: ShardedStore,
        costs: ReuseCosts,
        announcer: NodeAnnouncer | None = None,
        feed: EngineFeed | None = None,
    ) -> None:
        self._settings = settings = engine.settings
        space, deadline_s = engine.space, settings.lookup_deadline_s
        self._records = records
        self._costs = costs
        self._announcer = announcer
        self._publisher = LoadPublisher(costs, feed)
        self._tiers = TierMap(space)
        self._lookups = LookupExecutor(client, space, deadline_s, engine.tracer)
        self._intake = RequestIntake(engine, self._lookups)
        self._completion = LookupCompletion(settings, self._lookups)
        self._load_planner = LoadPlanner(settings, costs, self._tiers)
        self._load_tracker = LoadTracker(costs, self._tiers, self._load_planner)
        self._prober = LoadProber(costs, self._tiers, self._load_planner)
        self._save_planner = SavePlanner(space.of_rank())
        self._rank_reports = RankReports(space.num_ranks)
        self._uses = UseReporter(client)
        self._reservation: BlockReservation | None = None
        self._arrivals = arrival_counter()
        self._requests: dict[str, RequestState] = {}
        # Of requests since the last report, by stage.
        self._prediction_ratios: dict[str, list[float]] = {}
        self._counts = LoadCounts()
        self._waiting = WaitingRequests()
        # Jobs of the next step.
        self._loads: list[LoadJob] = []
        self._ended_loads: list[LoadOutcome] = []
        self._observes: list[ObserveJob] = []
        self._probe: LoadJob | None = None
        # The request that vLLM allocates blocks for next.
        self._awaiting_blocks: str | None = None

    def bind(
        self, pool: BlockPool, block_size: int, cache: PrefixCacheEvents | None = None
    ) -> None:
        """Use vLLM's block pool, and blend from now on.

        Args:
            pool: The block pool.
            block_size: Tokens per block.
            cache: The events of the pool's prefix cache. None: it is not followed.
        """
        self._reservation = BlockReservation(pool, block_size)
        self._publisher.bind(self._reservation, cache)
        self._lookups.blending_enabled = True
        if self._announcer is not None and cache is not None:
            self._announcer.bind(cache)

    def on_profile(self, profile: PrefillProfile, *, joins_passes: bool) -> None:
        """Predict computations by the profile that the worker measured."""
        self._costs.use_profile(profile, joins_passes=joins_passes)

    # The life of a request, in the order of vLLM's calls.

    def on_arrival(self, arrival: ArrivedRequest) -> None:
        """Count a request in the engine's queue, whether the connector serves it or not."""
        self._publisher.on_arrival(arrival)

    def on_new_request(self, new: NewRequest) -> None:
        """Start to track a request, and start its lookup."""
        request = self._intake.accept(new)
        if request is not None:
            name = new.request_id
            self._requests[name] = request
            self._waiting.add(name, request)
            if request.handoff is not None:
                self._publisher.on_handoff(name)
            if self._announcer is not None and request.segments:
                domain, segments = request.plan.domain, request.segments
                self._announcer.begin(name, domain, segments, new.block_hashes, new.cache_salt)

    def loadable_tokens(self, request_id: str, num_local: int) -> int | None:
        """Return how many tokens can be loaded after the num_local ones that vLLM has cached.

        None: unknown, ask again in the next step. vLLM may ask any number of times.
        """
        request = self._requests.get(request_id)
        tokens: int | None = 0
        if request is not None:
            try:
                before = request.decision
                tokens = self._loadable_tokens(request, num_local)
                if request.decision is not before:
                    self._publisher.on_decision(request_id, request)
            except Exception:
                log.exception(
                    "scheduler: no load planned, prompt is computed request=%s", request_id
                )
                request.load_failed, request.pending_load = True, None
        # With an answer vLLM allocates blocks next. If that fails, it does not call on_allocated.
        self._awaiting_blocks = request_id if tokens is not None else None
        return tokens

    def approximate_from(self, request_id: str) -> int | None:
        """Return the first position of the pending load that is not exact. None: all of it is.

        The request must share no block from there on with other requests.
        """
        request = self._requests.get(request_id)
        if request is None or request.blend is None or request.pending_load is None:
            return None
        first, end = request.pending_load
        exact_end = max(first, request.blend.exact_end)
        return exact_end if exact_end < end else None

    def on_allocated(self, request_id: str, blocks: Sequence[int], num_external: int) -> None:
        """Start the pending load of a request, whose blocks vLLM has allocated.

        Args:
            request_id: vLLM's id of the request.
            blocks: The request's block table.
            num_external: How many tokens vLLM expects to be loaded into the blocks.
        """
        self._awaiting_blocks = None
        request = self._requests.get(request_id)
        if request is None:
            return
        if num_external == 0 or request.pending_load is None:
            request.pending_load = None
            if request.phase is not RequestPhase.DECODE:
                request.enter(RequestPhase.PREFILL)
            return
        self._start_load(request_id, request, tuple(blocks))

    def on_reports(self, reports: Iterable[StepReport]) -> None:
        """Apply what the workers report after a step, one for each rank that has a report."""
        report = self._rank_reports.merge(reports)
        self._ended_loads += report.ended_loads
        self._tiers.update(report.tier_changes)
        if self._announcer is not None:
            self._announcer.on_tier_changes(report.tier_changes)
        for one in report.passes:
            self._costs.observe_compute(one.work, one.seconds, recomputed=one.recomputed)
        for probe in report.probes:
            self._prober.observe(probe)
        self.on_outcomes(report.outcomes)

    def on_outcomes(self, outcomes: Iterable[LoadOutcome]) -> None:
        """Apply the outcomes of loads that have ended in the worker."""
        for outcome in outcomes:
            try:
                self._counts.add(outcome)
                self._on_outcome(outcome)
            except Exception:
                log.exception("scheduler: outcome of a load lost request=%s", outcome.request_id)

    def step(
        self,
        progress: Iterable[tuple[str, int, int]],
        blocks_of: Callable[[str], Sequence[int]],
        finished_ids: Iterable[str] = (),
        preempted_ids: Iterable[str] = (),
    ) -> StepJobs:
        """Return the worker's jobs for the step that begins.

        Args:
            progress: (request id, tokens computed before, tokens of this step) of every request
                that runs in the step.
            blocks_of: Returns the block table of such a request.
            finished_ids: Requests that have ended since the last step.
            preempted_ids: Requests that were preempted since the last step.
        """
        work = _StepWork()
        publisher = self._publisher
        publisher.begin_step(preempted_ids)
        for request_id, computed, scheduled in progress:
            work.num_tokens += scheduled
            work.attended += computed * scheduled
            request = self._requests.get(request_id)
            if publisher.is_pending(request_id):
                publisher.on_progress(request_id, computed, scheduled, request)
            if request is None:
                work.prompt_tokens += scheduled if scheduled > 1 else 0
                continue
            work.prompt_tokens += max(0, min(scheduled, len(request.token_ids) - computed))
            try:
                request.computed_to = computed + scheduled
                self._on_progress(request, computed)
                if computed < len(request.token_ids):
                    self._add_prefill(work, request_id, request, computed, blocks_of)
            except Exception:
                log.exception("scheduler: computed tokens are not saved request=%s", request_id)
        publisher.publish()
        if variants := self._waiting.take_due():
            self._lookups.hold(variants, HOLD_S)
        self._completion.begin_step()
        return self._make_jobs(work, finished_ids)

    def _add_prefill(
        self,
        work: _StepWork,
        request_id: str,
        request: RequestState,
        computed: int,
        blocks_of: Callable[[str], Sequence[int]],
    ) -> None:
        """Add what a request's prefill asks of the worker: recompute, save, and measure."""
        if request.left_to_recompute:
            runs, request.left_to_recompute = request.left_to_recompute, ()
            blocks = tuple(blocks_of(request_id))
            shift = request.loaded_chunks, request.shifted_runs
            work.joint.append(PromptSlice(request.token_ids, blocks, runs, *shift))
            request.record.joint_tokens = sum(map(len, runs))
            work.recompute_tokens += request.record.joint_tokens
            work.attended += sum(map(sum, runs))
        end = request.computed_to
        work.saves += self._save_planner.take_saves(request_id, request, end, blocks_of)
        if request.needs_compute_cost(computed):
            end = min(end, len(request.token_ids))
            work.computed.append(ComputedRange(request_id, computed, end))

    def _make_jobs(self, work: _StepWork, finished_ids: Iterable[str]) -> StepJobs:
        loads, self._loads = self._loads, []
        observes, self._observes = self._observes, []
        ended_loads, self._ended_loads = self._ended_loads, []
        probe, self._probe = self._probe, None
        in_pass = work.num_tokens + work.recompute_tokens
        return StepJobs(
            tuple(loads),
            tuple(work.saves),
            tuple(observes),
            joint_recomputes=tuple(work.joint),
            ended_loads=tuple(ended_loads),
            probe=probe,
            is_idle=not self._requests and not work.num_tokens,
            num_arrivals=self._arrivals.count() if self._arrivals is not None else 0,
            release_kept_blocks=self._must_release_blocks(),
            finished_ids=tuple(finished_ids),
            computed=tuple(work.computed),
            num_tokens=work.num_tokens,
            recompute_tokens=work.recompute_tokens,
            prompt_tokens=work.prompt_tokens,
            work=self._costs.pass_cost(work.attended / max(1, in_pass), in_pass),
        )

    def on_finished(self, request_id: str, blocks: Sequence[int]) -> bool:
        """Stop tracking a request that has ended, was aborted or failed.

        Args:
            request_id: vLLM's id of the request.
            blocks: The request's block table.

        Returns:
            Whether vLLM must keep the blocks until ``on_released``.
        """
        self._waiting.remove(request_id)
        self._publisher.on_finished(request_id)
        if self._announcer is not None:
            self._announcer.end(request_id)
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        if request.lookup is not None:
            request.lookup.cancel()
        # The worker has yet to report the end of a load in flight, and vLLM takes back a request's
        # blocks only once.
        is_loading = request.phase is RequestPhase.LOADING
        # An answer of one token ends in its prefill step.
        request.enter(RequestPhase.DECODE)
        self._finish_record(request)
        try:
            if is_loading:
                return False
            observes = self._observe(request_id, request, blocks)
            return self._offer_probe(request_id, request, blocks) or observes
        except Exception:
            log.exception("scheduler: request is not observed request=%s", request_id)
            return False

    def on_released(self, request_ids: Iterable[str]) -> None:
        """Record that the kept blocks of requests that have ended are free again."""
        for request_id in request_ids:
            self._prober.forget(request_id)
            if self._reservation is not None:
                self._reservation.release(request_id)

    def take_counts(self) -> LoadCounts:
        """Return what this half counted since the last call."""
        ratios, self._prediction_ratios = self._prediction_ratios, {}
        counts, self._counts = self._counts, LoadCounts()
        return counts + LoadCounts(
            prediction_ratios=ratios,
            refused_plans=self._intake.take_refused(),
            uses=Counter(self._uses.take_counts()),
            queue=self._publisher.take_changes(),
        )

    def close(self) -> None:
        """Stop the lookups and the reports of uses."""
        self._uses.close()
        self._lookups.close()

    def _loadable_tokens(self, request: RequestState, num_local: int) -> int | None:
        if request.phase is RequestPhase.PREFILL:  # vLLM preempted it
            request.enter(RequestPhase.WAITING)
            request.computed_from = None
        if not request.recorded:
            request.record.count_local(num_local)
        if request.load_failed or request.lookup is None:
            return 0
        if len(request.token_ids) - 1 - num_local < self._settings.min_load_tokens:
            request.handoff = None  # so few tokens are computed in any case
        if request.stored is None and not self._completion.try_complete(request):
            return None
        decision = request.decision
        if decision is None or decision.num_local != num_local:
            decision = self._load_planner.decide(request, num_local)
            request.adopt(decision)
        # The last token is always computed: its output is the first token of the answer.
        end = min(decision.end, len(request.token_ids) - 1)
        if end - num_local < self._settings.min_load_tokens:
            request.pending_load = None
            return 0
        request.pending_load = (num_local, end)
        return end - num_local

    def _start_load(self, request_id: str, request: RequestState, blocks: tuple[int, ...]) -> None:
        assert request.pending_load is not None
        first, end = load = request.pending_load
        request.pending_load, request.missing_ranges = None, ()
        try:
            job = self._load_tracker.start(request_id, request, load, blocks, self._reservation)
        except Exception:
            # vLLM waits for the promised load. The worker reports a load of nothing as failed.
            log.exception("scheduler: load not started request=%s", request_id)
            job = LoadJob(request_id, (), first, end, blocks, request.plan.domain)
            request.spans, request.span_sources = (), {}
        self._loads.append(job)
        if not request.recorded:
            request.record.begin_load(first)
        request.enter(RequestPhase.LOADING)
        self._publisher.on_load_started(request_id, request)

    def _on_outcome(self, outcome: LoadOutcome) -> None:
        if self._reservation is not None:
            self._reservation.free_scratch(outcome.request_id)
        if outcome.reason == BLEND_UNSUPPORTED:
            self._lookups.blending_enabled = False
            for other in self._requests.values():
                other.disable_blend()
        request = self._requests.get(outcome.request_id)
        if request is not None:
            self._load_tracker.finish(request, outcome)
            self._publisher.on_load_ended(outcome.request_id)

    def _on_progress(self, request: RequestState, computed: int) -> None:
        """Move a running request, whose first ``computed`` tokens have KV, to its phase."""
        if request.phase is RequestPhase.WAITING:
            request.enter(RequestPhase.PREFILL)
        if request.computed_from is None:
            cached = computed - request.record.recomputed_tokens
            token_s = self._costs.prefill_token_s(cached, len(request.token_ids) - cached)
            request.begin_prefill(computed, token_s)
        if request.phase is RequestPhase.PREFILL and computed >= len(request.token_ids):
            request.enter(RequestPhase.DECODE)
            self._finish_record(request)

    def _finish_record(self, request: RequestState) -> None:
        if not request.recorded:
            request.recorded = True
            request.record.end_prefill()
            request.record.segments = segment_outcomes(
                request.reuse(self._settings.min_load_tokens)
            )
            # Where another engine computed the prompt, the times are not those of this one.
            if not request.plan.trial and request.handoff is None:
                for stage, ratio in request.record.prediction_ratios().items():
                    self._prediction_ratios.setdefault(stage, []).append(ratio)
                self._count_savings(request.record)
                if (predicted := request.record.predicted) is not None:
                    self._costs.observe_request(predicted.passes_s, request.record.passes_s)
            self._records.put(request.plan.request, request.record)
            self._report_uses(request)

    def _count_savings(self, record: RequestRecord) -> None:
        """Compare a request with loaded KV with computing all that vLLM had not cached."""
        if not record.loaded_tokens:
            return
        num_computed = record.prompt_tokens - record.local_tokens
        predicted_s = self._costs.predict_compute_s(record.local_tokens, num_computed)
        if predicted_s is not None:
            self._counts.add_saved(predicted_s, record.load_s + record.prefill_s)

    def _report_uses(self, request: RequestState) -> None:
        """Report the uses of a request that the store has not seen."""
        if request.plan.trial or request.local_tokens is None:
            return
        again = VariantUse(fix_overhead=1.0, token_s=request.token_s)
        cached = [(key, REUSE) for key in request.variants_in_prefix_cache()]
        self._uses.note(PREFIX_CACHE, cached)
        self._uses.note(COMPUTED, [(key, again) for key in request.variants_computed_again()])

    def _must_release_blocks(self) -> bool:
        allocation_failed, self._awaiting_blocks = self._awaiting_blocks is not None, None
        if self._reservation is None:
            return False
        return self._reservation.must_release(allocation_failed=allocation_failed)

    def _observe(self, request_id: str, request: RequestState, blocks: Sequence[int]) -> bool:
        """Queue the observation of a finished request. Return whether that keeps its blocks."""
        if self._reservation is None or not self._lookups.blending_enabled:
            return False
        job = observe_job(request_id, request, blocks, self._reservation)
        if job is None:
            return False
        self._observes.append(job)
        return True

    def _offer_probe(self, request_id: str, request: RequestState, blocks: Sequence[int]) -> bool:
        """Queue a load that a finished request declined. Return whether that keeps its blocks."""
        if self._reservation is None or self._probe is not None:
            return False
        self._probe = self._prober.probe_job(request_id, request, blocks, self._reservation)
        return self._probe is not None
