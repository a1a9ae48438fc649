"""Move KV between the store and vLLM's paged cache, in the worker process."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from ragcache_core.blend.token_selection import QUESTION_TOKENS
from ragcache_engine.blend.chunk_observer import ChunkObserver
from ragcache_engine.blend.recomputation_queue import RECOMPUTE_FAILED, RecomputationQueue
from ragcache_engine.handoff.layer_staging import LayerStaging
from ragcache_engine.handoff.layerwise_loading import LayerwiseLoader
from ragcache_engine.kv_cache.block_writer import BlockWriter, PlacedValue
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_engine.protocol.context import EngineContext
from ragcache_engine.protocol.messages import (
    BLEND_UNSUPPORTED,
    LoadJob,
    LoadOutcome,
    StepJobs,
    StepReport,
)
from ragcache_engine.telemetry.load_counts import LoadCounts
from ragcache_engine.tiers.local_tiers import make_local_tiers
from ragcache_engine.use_reporter import LOCAL_TIER, UseReporter
from ragcache_engine.vllm_interface.arrivals import arrival_counter
from ragcache_engine.worker.fetcher import Fetcher
from ragcache_engine.worker.load_probe import LoadProbe
from ragcache_engine.worker.load_results import LoadResults
from ragcache_engine.worker.loader import ValueLoader
from ragcache_engine.worker.pass_timer import PassTimer
from ragcache_engine.worker.saver import Saver
from ragcache_engine.worker.value_exporter import ValueExporter
from ragcache_kv.store_client.sharded import ShardedStore

if TYPE_CHECKING:
    from ragcache_engine.blend.components import BlendComponents
    from ragcache_engine.blend.joint_pass import JointPass

log = logging.getLogger("vllm.ragcache")


_WARM_UP_S = 60.0
"""Timeout of the warm-up. Compilation takes some seconds, and an unavailable store a load's
deadline."""

_IDLE_SLEEP_S = 0.002
"""Sleep of a step without a pass while the worker has no work. vLLM's worker polls for its next
step with sched_yield, and Linux 6.18 lets a thread that keeps yielding starve others on its core.
So an engine that waits for another engine would slow that one down."""

_WORKING_SLEEP_S = 0.0001
"""Sleep of a step without a pass while values are loaded or recomputed. Without it, the worker
would starve its own threads."""


class ConnectorWorker:
    """The connector in one worker process.

    vLLM calls it on the worker's main thread only, around and within forward passes. No method
    raises an exception, because vLLM ends the engine on one. The worker reports what it cannot load
    as blocks to recompute, and does not save what it cannot save.
    """

    def __init__(
        self,
        engine: EngineContext,
        cache: PagedCache,
        client: ShardedStore,
        blend: BlendComponents | None = None,
        joint_pass: JointPass | None = None,
    ) -> None:
        settings, space = engine.settings, engine.space
        self._rank, self._num_ranks = engine.rank, space.num_ranks
        rotation = blend.rotation if blend else None
        self._cache = cache
        self._client = client
        self._uses = UseReporter(client)
        note_reads = partial(self._uses.note, LOCAL_TIER)
        self._tiers = make_local_tiers(settings, space, cache.device, note_reads)
        self._loader = ValueLoader(
            Fetcher(client, space, self._tiers, rotation, cache.device),
            self._tiers,
            _warm_up_steps(client, settings.load_deadline_s, blend, cache.device),
            engine.tracer,
        )
        self._probe = LoadProbe(self._loader)
        self._writer = BlockWriter(cache, rotation)
        self._layerwise = LayerwiseLoader(cache, self._writer) if settings.layerwise else None
        self._timer = PassTimer(cache)
        saver = Saver(client, engine)
        self._exporter = ValueExporter(cache, saver, self._tiers, LayerStaging(cache), self._timer)
        self._joint_pass = joint_pass
        self._arrivals = arrival_counter()
        self._recomputation: RecomputationQueue | None = None
        self._chunk_observer: ChunkObserver | None = None
        if blend is not None:
            self._recomputation = RecomputationQueue(
                cache,
                blend,
                settings.recompute_slice_tokens,
                QUESTION_TOKENS,
                engine.tracer,
                joins_passes=joint_pass is not None,
            )
            self._chunk_observer = ChunkObserver(
                blend,
                saver.save_observation,
                settings.observe_deadline_s,
                tracer=engine.tracer,
                count_arrivals=None if self._arrivals is None else self._arrivals.count,
            )
        self._num_arrivals = 0
        self._no_requests = False
        self._jobs: dict[str, LoadJob] = {}
        # Ended loads of blends that wait for the other ranks, and those not yet reported of them.
        self._waiting: dict[str, LoadOutcome] = {}
        self._ended_loads: list[LoadOutcome] = []
        self._finished: frozenset[str] = frozenset()
        self._results = LoadResults(cache.shape.block_size)
        self._counts = LoadCounts()
        # How many jobs need the kept blocks of a finished request.
        self._holds: Counter[str] = Counter()
        self._released: set[str] = set()

    def wait_until_warm(self) -> None:
        """Wait for the warm-up, a minute at most. vLLM calls it before the engine serves."""
        self._loader.wait_until_warm(_WARM_UP_S)

    def begin_step(self, jobs: StepJobs) -> None:
        """Prepare the step's forward pass, which comes next."""
        self._exporter.export()
        self._num_arrivals, self._no_requests = jobs.num_arrivals, jobs.is_idle
        writes_layers = False
        if self._layerwise is not None:
            for load in self._layerwise.write_deferred(jobs.finished_ids):
                self._results.mark_bad(load.blocks, range(load.first, load.end))
            writes_layers = bool(jobs.num_tokens) and self._layerwise.begin_pass()
        # The duration of a pass that also writes layers says nothing about computing.
        self._timer.begin_pass(timed=not writes_layers)
        self._exporter.begin_pass(jobs.saves)
        if self._joint_pass is not None:
            self._joint_pass.prepare(jobs.joint_recomputes)

    def wait_for_layer(self, name: str) -> None:
        """Write a layer of layer-wise loads. Its attention comes next in the running pass."""
        if self._layerwise is not None and name in self._cache.index_of:
            self._layerwise.wait_for_layer(self._cache.index_of[name])

    def layer_done(self, name: str) -> None:
        """Copy a layer out. The running pass has computed it and waits with the next layer."""
        if name in self._cache.index_of:
            self._exporter.layer_done(self._cache.index_of[name])

    def start_loads(self, jobs: StepJobs) -> None:
        """Start the step's loads and observations. ``advance`` writes the loaded values."""
        for of_all in jobs.ended_loads:
            own = self._waiting.pop(of_all.request_id, None)
            if own is not None:  # it has not been cancelled meanwhile
                self._recompute(self._jobs[own.request_id], _with_missing(own, of_all))
        starting = []
        for job in jobs.loads:
            self._jobs[job.request_id] = job
            if not job.spans:
                self._end(job, _failed(job, "load failed"))
            elif job.recompute is not None and self._recomputation is None:
                self._end(job, _failed(job, BLEND_UNSUPPORTED))
            else:
                starting.append(job)
        self._loader.start(starting)
        if jobs.probe is not None:
            self._holds[jobs.probe.request_id] += 1
            self._probe.offer(jobs.probe)
        for observe in jobs.observes:
            self._holds[observe.request_id] += 1
            if self._chunk_observer is None:
                self._release((observe.request_id,))
            else:
                self._chunk_observer.start(observe)
        if jobs.release_kept_blocks:
            self._probe.abort()
            if self._chunk_observer is not None:
                self._chunk_observer.abort()

    def end_pass(self, jobs: StepJobs, *, failed: bool = False) -> None:
        """Note what the step's forward pass computed; ``begin_step`` exports it.

        Until the next pass no other writer uses the blocks. Where vLLM sends the first token before
        that, the token does not wait for the copies.

        Args:
            jobs: The step's jobs.
            failed: Whether the pass ended by an exception, so that none of its KV is correct.
        """
        not_recomputed = self._joint_pass.take_failed() if self._joint_pass is not None else ()
        self._timer.end_pass(jobs, failed=failed or bool(not_recomputed))
        incomplete: list[LoadJob] = []
        if jobs.num_tokens and self._layerwise is not None:
            incomplete = self._layerwise.end_pass()
        for load in incomplete:
            self._results.mark_bad(load.blocks, range(load.first, load.end))
        for one in not_recomputed:
            self._results.mark_bad(one.blocks, one.approximate)
        # vLLM recomputes a pass that lacked a layer or a recomputation, so its KV is not saved.
        succeeded = not failed and not incomplete and not not_recomputed
        if succeeded:
            self._counts.add_pass(jobs.prompt_tokens)
        self._exporter.end_pass(jobs.saves if succeeded else ())

    def advance(self, finished: Iterable[str], *, busy: bool) -> None:
        """Write the values that have arrived, and continue recomputation.

        Args:
            finished: Requests that ended, whose loads are cancelled.
            busy: Whether requests ran in this step.
        """
        self._finished = frozenset(finished)
        for request_id in self._finished:
            if (own := self._waiting.pop(request_id, None)) is not None:
                self._end(self._jobs[request_id], replace(own, reason="cancelled"))
            self._loader.cancel(request_id)
            if self._recomputation is not None:
                self._recomputation.cancel(request_id)
            self._timer.remove(request_id)
        recomputes = self._recomputation is not None and not self._recomputation.idle
        idle = not busy and self._loader.idle and not recomputes
        for outcome in self._loader.advance(self._write):
            if not self._probe.finish(outcome):
                self._on_loaded(self._jobs[outcome.request_id], outcome)
        self._release_read_values()
        if self._recomputation is not None:
            for job, outcome in self._recomputation.advance(busy=busy):
                self._end(job, outcome)
        if self._chunk_observer is not None:
            # A pass begins on all ranks or on none, and loads end at other times on each of them.
            # So several ranks observe only where no request is left.
            is_one = self._num_ranks == 1
            self._release(
                self._chunk_observer.advance(
                    idle=idle if is_one else not busy and self._no_requests,
                    num_arrivals=self._num_arrivals,
                    beside_work=is_one and not recomputes,
                )
            )
        self._probe.advance(idle=idle, wanted=busy or not self._no_requests or self._has_arrival())
        if not busy:
            time.sleep(_IDLE_SLEEP_S if idle and self._loader.idle else _WORKING_SLEEP_S)

    def take_received(self) -> set[str]:
        """Return the requests whose loads ended, well or not, since the last call."""
        return self._results.take_received()

    def take_released(self) -> set[str]:
        """Return the finished requests whose blocks the worker no longer needs."""
        self._release(self._probe.take_released())
        released, self._released = self._released, set()
        return released

    def take_bad_blocks(self) -> set[int]:
        """Return the blocks that vLLM must recompute."""
        return self._results.take_bad_blocks()

    def take_report(self) -> StepReport | None:
        """Return what ended since the last call, for the scheduler; None: nothing did."""
        # The outcomes come last: if a device event fails, they stay for the next report.
        passes, changes = self._timer.take_passes(), self._tiers.take_changes()
        ended, self._ended_loads = self._ended_loads, []
        probes = self._probe.take_outcomes()
        outcomes = self._results.take_outcomes()
        if not (outcomes or passes or changes or probes or ended):
            return None
        return StepReport(outcomes, passes, changes, probes, self._rank, ended)

    def take_counts(self) -> LoadCounts:
        """Return the counts since the last call, for metrics. Rank 0 speaks for all ranks.

        They compute the same passes, and their tiers have parts of the same variants.
        """
        counts, self._counts = self._counts, LoadCounts()
        tiers = self._tiers.take_counts()
        held_bytes = {name: self._num_ranks * size for name, size in tiers.held_bytes.items()}
        counts.add_tiers(replace(tiers, held_bytes=held_bytes))
        counts.uses.update(self._uses.take_counts())
        return LoadCounts() if self._rank else counts

    def close(self) -> None:
        """Abort all work in progress."""
        self._exporter.close()
        self._loader.close()
        self._tiers.close()
        self._uses.close()
        self._client.close()

    def _release(self, request_ids: Iterable[str]) -> None:
        """Note that a job no longer needs the kept blocks of each of these requests."""
        for request_id in request_ids:
            self._holds[request_id] -= 1
            if not self._holds[request_id]:
                del self._holds[request_id]
                self._released.add(request_id)

    def _write(self, job: LoadJob, values: Sequence[PlacedValue]) -> None:
        """Write values to their blocks, or keep them for the pass that writes layer by layer."""
        if self._layerwise is None or self._probe.is_probe(job.request_id):
            self._writer.write(job, values)
        else:
            self._layerwise.write(job, values)

    def _has_arrival(self) -> bool:
        """Tell whether a request has arrived since the step began."""
        return self._arrivals is not None and self._arrivals.count() != self._num_arrivals

    def _on_loaded(self, job: LoadJob, outcome: LoadOutcome) -> None:
        """End a load whose values have been written, or queue it for recomputation."""
        if (
            self._layerwise is not None
            and outcome.reason
            and self._layerwise.write_deferred((job.request_id,))
        ):
            outcome = replace(outcome, tokens=0)
        if job.recompute is None or self._recomputation is None:
            self._end(job, outcome)
        elif self._num_ranks == 1 or job.request_id in self._finished:
            self._recompute(job, outcome)
        else:
            # Another rank may miss what this one has, so the scheduler waits for all of them.
            self._waiting[job.request_id] = outcome
            self._ended_loads.append(outcome)

    def _recompute(self, job: LoadJob, outcome: LoadOutcome) -> None:
        """Queue an ended load of a blend for recomputation, unless it has failed."""
        if self._recomputation is None or outcome.reason:
            self._end(job, outcome)
            return
        try:
            self._recomputation.start(job, outcome)
        except Exception:
            log.exception("worker: cannot start recomputation request=%s", job.request_id)
            self._end(job, replace(outcome, reason=RECOMPUTE_FAILED))

    def _release_read_values(self) -> None:
        try:
            self._writer.release_read_values()
        except Exception:
            log.exception("worker: cannot release the values that the device has read")

    def _end(self, job: LoadJob, outcome: LoadOutcome) -> None:
        del self._jobs[job.request_id]
        self._results.add(job, outcome)


def _failed(job: LoadJob, reason: str) -> LoadOutcome:
    """Return the outcome of a load that could not start."""
    return LoadOutcome(job.request_id, 0, 0, 0.0, None, reason)


def _with_missing(own: LoadOutcome, of_all: LoadOutcome) -> LoadOutcome:
    """Return a rank's outcome with what any rank misses. Its bytes and seconds stay its own."""
    return replace(
        own,
        missing_variant=of_all.missing_variant,
        missing_ranges=of_all.missing_ranges,
        reason=of_all.reason,
    )


def _warm_up_steps(
    client: ShardedStore, timeout_s: float, blend: BlendComponents | None, device: torch.device
) -> list[Callable[[], None]]:
    steps: list[Callable[[], None]] = [partial(_connect, client, timeout_s)]
    if blend is not None and device.type == "cpu":  # a GPU needs no compiled loops
        steps.append(blend.rotation.warm_up)
        if blend.recomputer.chunk_shift is not None:
            steps.append(blend.recomputer.chunk_shift.warm_up)
    return steps


def _connect(client: ShardedStore, timeout_s: float) -> None:
    """Connect to the store. An outage delays the start by the timeout and no more."""
    client.connect(timeout_s)
    transports = client.transports()
    for shard, transport in transports.items():
        log.info("worker: connected shard=%s transport=%s", shard, transport)
    if not transports:
        log.info("worker: the store does not answer, the engine computes all KV until it does")
