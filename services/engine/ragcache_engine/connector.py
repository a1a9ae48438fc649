"""The class that vLLM makes: translates its connector interface to the two sides.

vLLM makes one object for the scheduler and one for every worker, in different processes on CPU.
Loads are asynchronous: vLLM parks the request and other requests keep running. What a forward pass
computed is copied out before the next one, so the per-layer hooks stay unused and CUDA graphs stay
whole; but for an engine that computes prompts for others (``EngineRole.PREFILL``), which copies layers
out as they end, and one that takes requests up before all layers are there (``layering``).
"""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragcache_engine.plugin import require_supported_vllm

require_supported_vllm()  # rather than an ImportError of what it does not have

import torch
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from ragcache_core.cost.load_or_compute import ReuseCosts
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import KVSpace
from ragcache_engine.blend.components import BlendComponents, make_blend_components
from ragcache_engine.blend.model_access import access_model
from ragcache_engine.blend.recomputer import Recomputer
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_engine.plugin import vllm_version, worker
from ragcache_engine.protocol.messages import StepJobs, StepReport
from ragcache_engine.protocol.roles import EngineRole
from ragcache_engine.scheduler.scheduler import ConnectorScheduler
from ragcache_engine.telemetry.load_counts import LoadCounts
from ragcache_engine.telemetry.metrics import LoadMetrics, LoadStats
from ragcache_engine.telemetry.request_records import RequestRecords, serve
from ragcache_engine.threads import unpinned_pool
from ragcache_engine.vllm_interface.block_salting import salt_block_hashes
from ragcache_engine.worker.prefill_profiling import (
    measure,
    profile_path,
    read_saved_profile,
    write_profile,
)
from ragcache_engine.worker.processor_name import machine
from ragcache_engine.worker.worker import ConnectorWorker
from ragcache_kv.model_folder import load_model_folder
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_wire.settings import EngineSettings
from ragcache_wire.trace_context import TRACEPARENT
from ragcache_wire.tracing import Tracer, tracer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.ragcache")

_PROFILE_BUDGET_S = 5.0
"""Seconds that a start may take longer, if no earlier one has left its profile."""


@dataclass(slots=True)
class _StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    jobs: StepJobs


@dataclass(slots=True)
class _WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join the reports of two workers."""
        assert isinstance(other, _WorkerMetadata)
        mine, others = self.report, other.report
        return _WorkerMetadata(
            StepReport(
                mine.outcomes + others.outcomes,
                mine.passes + others.passes,
                {**mine.tier_changes, **others.tier_changes},
            )
        )


@dataclass(slots=True)
class _Measured(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker found out at start, which vLLM carries to the scheduler's process."""

    profile: PrefillProfile


class RagCacheConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Chunk-caches for an unpatched vLLM; see the module's docstring."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._config = EngineSettings()
        _refuse_unsupported(vllm_config, self._config)
        _refuse_windows(kv_cache_config)
        self._engine_role = EngineRole(vllm_config.kv_transfer_config.kv_role)
        self._space = _kv_space(vllm_config)
        self._tracer = _tracer(self._config)
        self._scheduler: ConnectorScheduler | None = None
        self._worker: ConnectorWorker | None = None
        self._handled: BaseException | None = None  # by whoever runs the engine
        self._cache: PagedCache | None = None
        self._recomputer: Recomputer | None = None
        if role is KVConnectorRole.SCHEDULER:
            book, costs = RequestRecords(), ReuseCosts()
            client = ShardedStore(self._config.cachestore)
            self._scheduler = ConnectorScheduler(
                self._config, self._space, book, client, costs, self._tracer, self._engine_role
            )
            listen = self._config.records_listen
            self._records = serve(book, costs, listen) if listen else None

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Learn of the pool of blocks; vLLM calls it once, in the scheduler's process."""
        if self._scheduler is not None:
            self._scheduler.bind(gpu_block_pool, self._vllm_config.cache_config.block_size)

    # The server's process, where there is no connector.

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether a pass must call us for each layer, which one graph for all of it does not."""
        return EngineSettings().layerwise

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Counts as they came from a worker."""
        return LoadStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> LoadMetrics:
        """Our metrics beside vLLM's own."""
        return LoadMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Worker process.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take hold of the paged cache; vLLM calls it once, before the first request."""
        layers = self._vllm_config.compilation_config.static_forward_context
        cache = PagedCache(
            {name: layers[name] for name in kv_caches},
            next(iter(kv_caches.values())).device,
            self._vllm_config.cache_config.block_size,
        )
        _check_layout(cache, self._space)
        # Connects on the worker side's own threads, which are bound to no core (``threads``).
        client = ShardedStore(self._config.cachestore)
        self._cache, self._recomputer = cache, self._reach_model()
        self._worker = ConnectorWorker(
            self._config,
            self._space,
            cache,
            client,
            self._blender(cache),
            self._tracer,
            self._engine_role,
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What computing takes here; vLLM asks once, when the model is compiled and warm.

        It calls nothing more before the first step, so this waits until loads are fast: else the
        first questions would pay for it, and what compiles would slow what is measured.
        """
        if self._worker is not None:
            self._worker.wait_until_warm()
        try:
            profile = self._profile()
        except Exception:
            log.exception("what computing takes is not known before requests show it")
            return None
        return _Measured(profile) if profile is not None else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins; vLLM calls this first, ahead of the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        self._handled = sys.exc_info()[1]
        if self._worker is not None:
            self._worker.begin_step(self._jobs())
            # What is fetched beside the pass is there when it ends; vLLM says the next thing below
            # only then, where the loads are asynchronous.
            self._worker.start_loads(self._jobs())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """This step's loads may begin; they have."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A layer's attention comes next; of use where layers are loaded one by one."""
        if self._worker is not None:
            self._worker.layer_needed(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """A layer has ended; of use where prompts are computed for another engine."""
        if self._worker is not None:
            self._worker.layer_done(layer_name)

    def wait_for_save(self) -> None:
        """The forward pass has ended; what it made whole is sent in the background."""
        if self._worker is not None:
            # Its first runner comes here however the pass ends.
            failed = sys.exc_info()[1] is not self._handled
            self._worker.end_pass(self._jobs(), failed=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Ids whose (observations, loads) ended; saves never hold blocks back."""
        if self._worker is None:
            return None, None
        self._worker.advance(finished_req_ids, busy=self._jobs().num_tokens > 0)
        return self._worker.take_released() or None, self._worker.take_received() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose load failed; vLLM computes from the first of them on."""
        return self._worker.take_bad_blocks() if self._worker is not None else set()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What this process counted since the last step, for vLLM's metrics and log."""
        counts = self._worker.take_counts() if self._worker is not None else LoadCounts()
        if self._scheduler is not None:
            counts.refused_plans += self._scheduler.take_refused()
        return LoadStats(counts.to_dict()) if counts else None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What the scheduler side should know of this step."""
        report = self._worker.take_report() if self._worker is not None else None
        return _WorkerMetadata(report) if report is not None else None

    # Scheduler process.

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Learn what the workers found out, by their rank."""
        first = metadata.get(0)
        if self._scheduler is not None and isinstance(first, _Measured):
            self._scheduler.on_profile(first.profile)

    def on_new_request(self, request: Request) -> None:
        """A request arrived."""
        # LoRA changes KV, images and embeddings have no token ids: neither has chunk-caches.
        has_tokens = request.prompt_token_ids and request.prompt_embeds is None
        if self._scheduler is None or request.lora_request or request.mm_features or not has_tokens:
            return
        self._scheduler.on_new_request(
            request.request_id,
            request.prompt_token_ids,
            request.kv_transfer_params,
            cache_salt=request.cache_salt,
            cacheable=self._is_cacheable(request),
            traceparent=(request.trace_headers or {}).get(TRACEPARENT, ""),
        )

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those computed, and whether asynchronously."""
        assert self._scheduler is not None
        tokens = self._scheduler.loadable_tokens(request.request_id, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Blocks were allocated for the request."""
        assert self._scheduler is not None
        first = self._scheduler.approximate_from(request.request_id)
        if num_external_tokens and first is not None:
            # vLLM makes blocks known by their hashes when what is loaded into them has come.
            salt_block_hashes(request, first // self._vllm_config.cache_config.block_size)
        self._scheduler.on_allocated(
            request.request_id, blocks.get_block_ids()[0], num_external_tokens
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Jobs of the step about to run."""
        assert self._scheduler is not None
        tables = scheduler_output.kv_connector_block_state

        def blocks_of(request_id: str) -> Sequence[int]:
            groups = tables.get_block_ids(request_id) if tables is not None else None
            assert groups is not None
            blocks: list[int] = groups[0]
            return blocks

        progress, ended = _progress(scheduler_output), scheduler_output.finished_req_ids
        return _StepMetadata(self._scheduler.step(progress, blocks_of, ended))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """A step ended in the workers."""
        assert self._scheduler is not None
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, _WorkerMetadata):
            self._scheduler.on_report(report.report)
        self._scheduler.on_released(connector_output.finished_sending or ())

    def reset_cache(self) -> bool:
        """Forget what is kept: refused, as what the store keeps is others', too."""
        log.warning(
            "the cache of chunks is not reset: its keys are made from the model's folder. For other"
            " weights make another folder, and start again"
        )
        return False

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; its blocks may be freed, unless its chunks are observed first."""
        assert self._scheduler is not None
        return self._scheduler.on_finished(request.request_id, block_ids), None

    def shutdown(self) -> None:
        """The process is ending."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
            if self._records is not None:
                self._records.stop(None)
        self._tracer.close()

    def _reach_model(self) -> Recomputer | None:
        """None where passes of our own cannot be made, which is no reason not to serve."""
        block_size = self._vllm_config.cache_config.block_size
        try:
            return Recomputer(access_model(worker().model_runner, block_size))
        except Exception as error:
            log.warning(
                "chunks are reused behind their own prefix only, and what computing takes is not"
                " measured at start: %s",
                error,
            )
            return None

    def _blender(self, cache: PagedCache) -> BlendComponents | None:
        """None where this model cannot be blended, which is no reason not to serve it."""
        if self._recomputer is None:
            return None
        config = load_model_folder(str(self._vllm_config.model_config.model)).config
        try:
            model = worker().model_runner.model
            return make_blend_components(model, self._recomputer, cache, config, self._space)
        except Exception as error:
            log.warning("chunks are reused behind their own prefix only: %s", error)
            return None

    def _profile(self) -> PrefillProfile | None:
        """That of an earlier start, or taken now."""
        if self._cache is None or self._recomputer is None:
            return None
        config = self._vllm_config
        path = profile_path(
            Path(envs.VLLM_CACHE_ROOT),
            space=repr(self._space),
            vllm=vllm_version(),
            torch=torch.__version__,
            machine=machine(self._cache.device),
            pass_tokens=self._recomputer.max_tokens,
            max_length=config.model_config.max_model_len,
            compiled=str(config.compilation_config.mode),
        )
        profile = read_saved_profile(path)
        if profile is None:
            profile = measure(
                self._cache,
                self._recomputer,
                num_blocks=config.cache_config.num_gpu_blocks,
                max_length=config.model_config.max_model_len,
                budget_s=_PROFILE_BUDGET_S,
            )
            write_profile(path, profile)
        longest = profile.computed[-1]
        log.info(
            "a pass over %d tokens takes %.3f s here, behind %d tokens %.3f s",
            longest,
            profile.seconds[0][-1],
            profile.cached[-1],
            profile.seconds[-1][-1],
        )
        return profile

    def _is_cacheable(self, request: Request) -> bool:
        """Whether vLLM's own prefix cache would serve a request.

        Not one that asks for its prompt's logprobs, or says so itself (skip_reading_prefix_cache),
        nor one that is pooled. The prompt of a resumable one grows while it runs.
        """
        return (
            bool(self._vllm_config.cache_config.enable_prefix_caching)
            and request.pooling_params is None
            and not request.skip_reading_prefix_cache
            and not request.resumable
        )

    def _jobs(self) -> StepJobs:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _StepMetadata)
        return metadata.jobs


def _progress(scheduler_output: SchedulerOutput) -> Iterator[tuple[str, int, int]]:
    scheduled = scheduler_output.num_scheduled_tokens
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, scheduled[new.req_id]
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, computed, scheduled[request_id]


def _refuse_unsupported(vllm_config: VllmConfig, settings: EngineSettings) -> None:
    """Refuse at start, in words, what would go wrong later. Raises InvalidInput."""
    parallel = vllm_config.parallel_config
    if parallel.world_size_across_dp > 1:
        raise InvalidInput(
            "engines[].args", "ask for several ranks", "run one rank per engine, and more engines"
        )
    model = vllm_config.model_config
    in_folder = getattr(model.hf_config, "quantization_config", None) is not None
    if model.hf_overrides or (model.quantization and not in_folder):
        # Keys are made from the folder; what is changed beside it would not be in them.
        raise InvalidInput(
            "engines[].args",
            "set --hf-overrides or --quantization",
            "make a model folder that says the same in its config.json",
        )
    if model.enable_sleep_mode:
        # It discards KV that may be waiting to be copied out, and no step comes before.
        raise InvalidInput("engines[].args", "set --enable-sleep-mode", "leave it out")
    if vllm_config.cache_config.cache_dtype != "auto":
        raise InvalidInput(
            "engines[].args", "set --kv-cache-dtype", "leave it out: KV is kept in the model's type"
        )
    if vllm_config.speculative_config is not None and settings.layerwise:
        # vLLM then asks for what went wrong in a pass before the pass has ended.
        raise InvalidInput(
            "RAGCACHE_LAYERWISE", "is on, and tokens are drafted", "leave out one of the two"
        )
    role = vllm_config.kv_transfer_config.kv_role
    if role == EngineRole.PREFILL and vllm_config.max_concurrent_batches > 1:
        # vLLM takes it that such an engine loads nothing, and gives a load blocks that the pass
        # before may still be writing.
        raise InvalidInput(
            "engines[].args",
            f"schedule ahead of the pass that runs, with kv_role {role}",
            "add --no-async-scheduling",
        )
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        raise InvalidInput(
            "kv_load_failure_policy",
            f"is {policy!r}",
            "set it to recompute: a lost cache is no error",
        )


def _refuse_windows(kv_cache_config: KVCacheConfig) -> None:
    """Refuse at start a model whose KV vLLM lets go of behind a window. Raises InvalidInput.

    Its prefix cache then finds prompts whose older blocks hold nothing; to save these would be to
    keep garbage under the name of something exact. Windows in some layers only are kept whole.
    """
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        uniform = isinstance(spec, UniformTypeKVCacheSpecs)
        for one in spec.kv_cache_specs.values() if uniform else (spec,):
            if not isinstance(one, FullAttentionSpec):
                raise InvalidInput(
                    "model.source",
                    f"has KV of kind {type(one).__name__}, of which vLLM keeps a part only",
                    "name a decoder model with full attention; where its attention has a window,"
                    " add --disable-sliding-window, which makes prompts no longer than that",
                )


def _tracer(config: EngineSettings) -> Tracer:
    if config.otlp_endpoint is None:
        return Tracer()
    # What exports runs on the cores of who starts it, and is to stay off those vLLM computes on.
    with unpinned_pool(1, "ragcache-trace") as pool:
        return pool.submit(tracer, config.otlp_endpoint, "engine", platform.node()).result()


def _kv_space(vllm_config: VllmConfig) -> KVSpace:
    model = vllm_config.model_config
    return load_model_folder(str(model.model)).space(str(model.dtype).removeprefix("torch."))


def _check_layout(cache: PagedCache, space: KVSpace) -> None:
    """Keys are made from config.json; what vLLM allocated must agree. Raises InvalidInput."""
    shape = cache.shape
    dtype = str(shape.dtype).removeprefix("torch.")
    found = (cache.num_layers, shape.num_kv_heads, shape.head_dim, dtype)
    wanted = (space.num_layers, space.num_kv_heads, space.head_dim, space.dtype)
    if found != wanted:
        raise InvalidInput(
            "model.source",
            f"has KV of (layers, heads, head_dim, dtype) {found}, its config.json says {wanted}",
            "name a decoder model with ordinary attention in every layer",
        )
