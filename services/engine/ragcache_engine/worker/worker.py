"""Moves KV between the store and vLLM's paged cache, in the worker process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_engine.blend.chunk_observer import ChunkObserver
from ragcache_engine.blend.recomputation_queue import RECOMPUTE_FAILED, RecomputationQueue
from ragcache_engine.handoff.layer_staging import LayerStaging
from ragcache_engine.handoff.layerwise_loading import LayerwiseLoader
from ragcache_engine.kv_cache.block_writer import BlockWriter
from ragcache_engine.kv_cache.device_event import DeviceEvent
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_engine.protocol.messages import (
    BLEND_UNSUPPORTED,
    LoadJob,
    LoadOutcome,
    SaveJob,
    StepJobs,
    StepReport,
)
from ragcache_engine.protocol.roles import EngineRole
from ragcache_engine.telemetry.load_counts import LoadCounts
from ragcache_engine.tiers.local_tiers import OfferedValue, make_local_tiers
from ragcache_engine.worker.compute_costs import ComputeCosts
from ragcache_engine.worker.fetcher import Fetcher
from ragcache_engine.worker.loader import Loader
from ragcache_engine.worker.saver import Saver
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_wire.settings import EngineSettings
from ragcache_wire.tracing import Tracer

if TYPE_CHECKING:
    from ragcache_engine.blend.components import BlendComponents

log = logging.getLogger("vllm.ragcache")


_STREAMS = 4
"""Values that go out at once while they are computed: those of one pass, mostly."""

_HEAD_START_S = 0.02
"""How long saves leave the engine alone, unless somebody waits for them."""

_WARM_UP_S = 60.0
"""What a first load needs is compiled within some seconds, and a store that is away is given up
after a load's deadline."""

_GIVE_WAY_S = {True: 0.002, False: 0.0001}
"""What a step without a pass sleeps, while nothing is loaded or repaired, and while something is.
vLLM's worker looks for its next step by yielding, and Linux 6.18 lets whoever yields on and on
starve all else on its core until it sleeps: an engine that waits for another one would hold that
one up, and one that loads its own threads."""

_LEAST_PASS = 32
"""Tokens of prompts in a pass that says what computing takes; with fewer, answers decide it."""


class ConnectorWorker:
    """One per worker. Called on the worker's main thread only, around and within forward passes.

    No exception leaves its methods: vLLM ends the engine on one. What cannot be loaded is reported
    as blocks to recompute; what cannot be saved is not saved.
    """

    def __init__(
        self,
        config: EngineSettings,
        space: KVSpace,
        cache: PagedCache,
        client: ShardedStore,
        blender: BlendComponents | None = None,
        tracer: Tracer | None = None,
        role: EngineRole = EngineRole.BOTH,
    ) -> None:
        self._costs = ComputeCosts()
        self._pass_began: DeviceEvent | None = None
        self._passes: list[tuple[float, DeviceEvent, DeviceEvent]] = []
        self._cache = cache
        self._client = client
        rotation = blender.rotation if blender else None
        self._tiers = make_local_tiers(config, space, cache.device, self._note_reads)
        fetcher = Fetcher(client, space, self._tiers, rotation, cache.device)

        def connect() -> None:
            client.connect(config.load_deadline_s)  # an outage delays the start by no more
            transports = client.transports()
            for shard, transport in transports.items():
                log.info("values of shard %s come over the %s transport", shard, transport)
            if not transports:
                log.info("the store does not answer yet; all is computed until it does")

        first: list[Callable[[], None]] = [connect]
        if rotation is not None and cache.device.type == "cpu":  # a GPU turns keys by itself
            first.append(rotation.warm_up)
        self._loader = Loader(fetcher, self._tiers, first, tracer)
        self._writer = BlockWriter(cache, rotation)
        self._layering: LayerwiseLoader | None = None
        if config.layerwise:
            self._layering = LayerwiseLoader(cache, self._writer)
        # Of an engine for whose prompts somebody waits, values go out as they are computed.
        hands_over = role is EngineRole.PREFILL
        self._staging = LayerStaging(cache) if hands_over else None
        self._saver = Saver(
            self._client,
            space,
            config.save_deadline_s,
            config.save_queue_bytes,
            _STREAMS if hands_over else 1,
            0.0 if hands_over else _HEAD_START_S,
            tracer,
        )
        self._repairer: RecomputationQueue | None = None
        self._observing: ChunkObserver | None = None
        if blender is not None:
            recomputer, observer = blender.recomputer, blender.observer
            self._repairer = RecomputationQueue(
                cache,
                recomputer,
                observer,
                config.recompute_slice_tokens,
                config.question_tokens,
                tracer,
            )
            self._observing = ChunkObserver(
                observer,
                recomputer.max_tokens,
                self._saver.save_observation,
                config.observe_deadline_s,
                tracer=tracer,
            )
        self._computed: list[SaveJob] = []
        self._released: set[str] = set()
        self._counts = LoadCounts()
        self._jobs: dict[str, LoadJob] = {}
        self._bad_blocks: set[int] = set()
        self._received: set[str] = set()
        self._report = StepReport()

    def wait_until_warm(self) -> None:
        """Until what first loads need is there, a minute at most; for before the engine serves."""
        self._loader.wait_until_warm(_WARM_UP_S)

    def begin_step(self, jobs: StepJobs) -> None:
        """A step has begun; its forward pass comes next."""
        self._save_computed()
        completes = False
        if self._layering is not None:
            for load in self._layering.write_deferred(jobs.finished_ids):
                self._mark_bad(load, load.first)
            completes = bool(jobs.num_tokens) and self._layering.begin_pass()
        # A pass that layers are written beside says nothing of what computing takes.
        self._pass_began = None if completes else self._moment()
        if self._staging is None:
            return
        self._staging.end_pass()  # of a pass that broke off
        for job in jobs.saves:
            try:
                if self._saver.wants(job.span.variant, job.info.num_bytes):
                    self._saver.stream(job, self._staging.begin(job))
            except Exception:
                log.exception("a variant is not sent while it is computed")

    def wait_for_layer(self, name: str) -> None:
        """A layer's attention comes next in the pass that runs."""
        if self._layering is not None and name in self._cache.index_of:
            self._layering.wait_for_layer(self._cache.index_of[name])

    def layer_done(self, name: str) -> None:
        """A layer has written and read its KV in the pass that runs, while the next one waits."""
        if self._staging is not None and name in self._cache.index_of:
            self._staging.copy_layer(self._cache.index_of[name])

    def start_loads(self, jobs: StepJobs) -> None:
        """Begin this step's loads and observations: nothing is written before ``advance``."""
        starting = []
        for job in jobs.loads:
            self._jobs[job.request_id] = job
            if not job.spans:
                self._end(job, LoadOutcome(job.request_id, 0, 0, 0.0, None, "load failed"))
            elif job.recompute is not None and self._repairer is None:
                self._end(job, LoadOutcome(job.request_id, 0, 0, 0.0, None, BLEND_UNSUPPORTED))
            else:
                starting.append(job)
        self._loader.start(starting)
        for observe in jobs.observes:
            if self._observing is None:
                self._released.add(observe.request_id)
            else:
                self._observing.start(observe)
        if jobs.release_kept_blocks and self._observing is not None:
            self._observing.let_go()

    def end_pass(self, jobs: StepJobs, *, failed: bool = False) -> None:
        """The step's forward pass has ended; what it computed is saved before the next one begins.

        Until then nobody writes to the blocks, and the first token need not wait for the copying
        where vLLM sends it before that. failed: it ended by an exception, and nothing of it is
        right.
        """
        began, self._pass_began = self._pass_began, None
        ended = self._moment() if jobs.num_tokens else None
        if began is not None and ended is not None and not failed:
            if jobs.computed:
                self._costs.add(jobs.computed, jobs.num_tokens, began, ended)
            if jobs.prompt_tokens >= _LEAST_PASS:
                self._passes.append((jobs.work, began, ended))
        # What was computed in a pass that lacked something is computed again, and not kept.
        lacked = jobs.num_tokens and self._layering is not None and self._layering.end_pass()
        for load in lacked or ():
            self._mark_bad(load, load.first)
        if not failed and not lacked:
            self._counts.add_pass(jobs.prompt_tokens)
            self._computed += jobs.saves
        if self._staging is not None:  # somebody waits for it more than for the first token
            self._save_computed()
            self._staging.end_pass()

    def advance(self, finished: Iterable[str], *, busy: bool) -> None:
        """Write what has arrived and go on with repairs.

        finished: requests that ended, whose loads nobody wants. busy: requests ran in this step.
        """
        for request_id in finished:
            self._loader.cancel(request_id)
            if self._repairer is not None:
                self._repairer.cancel(request_id)
            self._costs.forget(request_id)
        idle = not busy and self._loader.idle and (self._repairer is None or self._repairer.idle)
        write = self._writer.write if self._layering is None else self._layering.write
        for loaded in self._loader.advance(write):
            self._on_loaded(self._jobs[loaded.request_id], loaded)
        self._let_go()
        if self._repairer is not None:
            for job, outcome in self._repairer.advance(busy=busy):
                self._end(job, outcome)
        if self._observing is not None:
            self._released |= self._observing.advance(idle=idle)
        if not busy:
            time.sleep(_GIVE_WAY_S[idle])

    def take_received(self) -> set[str]:
        """Requests whose loads ended, well or not, since the last call."""
        received, self._received = self._received, set()
        return received

    def take_released(self) -> set[str]:
        """Requests that have ended, the blocks of which are not needed any more."""
        released, self._released = self._released, set()
        return released

    def take_bad_blocks(self) -> set[int]:
        """Blocks that vLLM has to recompute."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> StepReport | None:
        """What ended since the last call, for the scheduler side."""
        while self._passes and self._passes[0][2].is_complete:
            work, began, ended = self._passes.pop(0)
            self._report.passes.append((work, ended.seconds_since(began)))
        self._report.tier_changes = self._tiers.take_changes()
        if not (self._report.outcomes or self._report.passes or self._report.tier_changes):
            return None
        report, self._report = self._report, StepReport()
        return report

    def take_counts(self) -> LoadCounts:
        """What became of loads since the last call, for metrics."""
        counts, self._counts = self._counts, LoadCounts()
        counts.add_tiers(self._tiers.take_counts())
        return counts

    def close(self) -> None:
        """Give up what is under way."""
        if self._staging is not None:
            self._staging.close()
        self._saver.close()
        self._loader.close()
        self._tiers.close()
        self._client.close()

    def _on_loaded(self, job: LoadJob, outcome: LoadOutcome) -> None:
        """What came of a load has been written; it may have to be mended."""
        if (
            self._layering is not None
            and outcome.reason
            and self._layering.write_deferred((job.request_id,))
        ):
            outcome = replace(outcome, tokens=0)
        if job.recompute is None or self._repairer is None or outcome.reason:
            self._end(job, outcome)
            return
        try:
            self._repairer.start(job, outcome)
        except Exception:
            log.exception("KV of request %s cannot be mended", job.request_id)
            self._end(job, replace(outcome, reason=RECOMPUTE_FAILED))

    def _let_go(self) -> None:
        try:
            self._writer.let_go()
        except Exception:
            log.exception("what the device is done with is not known")

    def _note_reads(self, keys: Sequence[VariantKey]) -> None:
        """Values were read here that a store holds, too, and would think cold."""
        self._client.note_reads(keys)

    def _save_computed(self) -> None:
        """Copy new variants out of the cache and queue them for the store."""
        jobs, self._computed = self._computed, []
        for job in jobs:
            try:
                self._save(job)
            except Exception:
                log.exception("a variant was not saved")
        if jobs:
            self._tiers.settle()

    def _save(self, job: SaveJob) -> None:
        staged = self._staging.take(job) if self._staging is not None else None
        if staged is not None:  # it is on its way already
            num_bytes, native = staged.value.nbytes, staged.wait_for_value
            staged.complete(self._cost_s(job))
        elif self._saver.wants(job.span.variant, job.info.num_bytes):
            num_bytes, native = job.info.num_bytes, self._copied_out(job)
            self._saver.save(job, native, self._costs.of(job.request_id, job.span))
        else:
            return
        offer = OfferedValue.of(job.span.variant, job.info, num_bytes, job.origin.domain, native)
        self._tiers.offer((offer,))

    def _copied_out(self, job: SaveJob) -> Callable[[], torch.Tensor]:
        """Copy what was computed out of the cache, and give it to whoever waits until it is there.

        A GPU is told to, ahead of the next pass, and not waited for here.
        """
        span = job.span
        value = self._cache.empty(span.end - span.start)
        for layer in range(self._cache.num_layers):
            self._cache.read_layer(layer, job.blocks, span.start, span.end, value[layer])
        copied = self._moment()
        if copied is None:  # then by a copy that is waited for
            value = self._cache.read(job.blocks, span.start, span.end)

        def native() -> torch.Tensor:
            if copied is not None:
                copied.wait()
            return value

        return native

    def _moment(self) -> DeviceEvent | None:
        try:
            return self._cache.record_event()
        except Exception:
            log.exception("what a pass takes is not known")
            return None

    def _cost_s(self, job: SaveJob) -> float:
        """Seconds that computing a value took; 0: unknown. For after it was read."""
        try:
            return self._costs.of(job.request_id, job.span)()
        except Exception:
            log.exception("what a variant took is not known")
            return 0.0

    def _end(self, job: LoadJob, outcome: LoadOutcome) -> None:
        """A load has ended, well or not."""
        del self._jobs[job.request_id]
        self._received.add(job.request_id)
        if outcome.reason:
            outcome = self._recomputed(job, outcome)
        self._counts.add(outcome)
        self._report.outcomes.append(outcome)

    def _recomputed(self, job: LoadJob, outcome: LoadOutcome) -> LoadOutcome:
        """Report what did not come as bad blocks; returns the outcome without what they take along.

        vLLM computes from the start of the first bad block on, so tokens of a good variant that
        share it are computed again with it; and so is all that would have had to be mended.
        """
        good = job.first + outcome.tokens
        if job.recompute is not None:
            good = min(good, max(job.first, job.recompute.exact_end))
        tokens = max(0, self._mark_bad(job, good) - job.first)
        return replace(outcome, tokens=tokens, missing_ranges=(), blended_tokens=0, recomputed_tokens=0)

    def _mark_bad(self, job: LoadJob, good: int) -> int:
        """Report blocks from position good on; returns the position that vLLM computes from."""
        size = self._cache.shape.block_size
        first_bad = good // size
        self._bad_blocks.update(job.blocks[first_bad : -(-job.end // size)])
        return first_bad * size
