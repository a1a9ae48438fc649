"""The class that vLLM makes: passes vLLM's connector interface on to the two halves.

vLLM makes one connector for the scheduler and one for each worker. On a CPU these are in different
processes. Loads are asynchronous: vLLM parks the request, and other requests keep running. The
worker copies the KV of a forward pass out before the next pass. So vLLM's hooks per layer are
unused, and CUDA graphs stay complete. There are two exceptions. A prompt that another engine
decodes is copied out layer by layer, as the layers are computed. Layer-wise loading writes layers
during a pass.
"""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragcache_engine.plugin import require_supported_vllm

require_supported_vllm()  # before an import fails that another vLLM does not have

import torch
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tp_group

from ragcache_core.cost.load_or_compute import ReuseCosts
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.errors import InvalidInput
from ragcache_engine.announcements.node_announcer import NodeAnnouncer
from ragcache_engine.blend.components import BlendComponents, make_blend_components
from ragcache_engine.blend.joint_pass import JointPass
from ragcache_engine.blend.ranks import ONE_RANK, Ranks
from ragcache_engine.blend.recomputer import Recomputer, access_model
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_engine.plugin import current_worker, vllm_version
from ragcache_engine.protocol.context import EngineContext
from ragcache_engine.protocol.messages import StepJobs, StepReport
from ragcache_engine.scheduler.load_publisher import ArrivedRequest
from ragcache_engine.scheduler.request import NewRequest
from ragcache_engine.scheduler.scheduler import ConnectorScheduler
from ragcache_engine.telemetry.engine_feed import EngineFeed
from ragcache_engine.telemetry.load_counts import LoadCounts
from ragcache_engine.telemetry.metrics import LoadMetrics, LoadStats, serve_metrics
from ragcache_engine.telemetry.request_records import RequestRecords, serve_records
from ragcache_engine.threads import unpinned_pool
from ragcache_engine.vllm_interface.block_events import PrefixCacheEvents
from ragcache_engine.vllm_interface.block_salting import salt_block_hashes
from ragcache_engine.vllm_interface.requirements import (
    check_config,
    check_full_attention,
    check_layout,
    check_ranks,
)
from ragcache_engine.worker.prefill_profiling import (
    measure_profile,
    processor_name,
    profile_path,
    read_saved_profile,
    write_profile,
)
from ragcache_engine.worker.worker import ConnectorWorker
from ragcache_kv.model.folder import load_model_folder
from ragcache_kv.store_client.rank_store import RankStore
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_wire.settings import EngineSettings
from ragcache_wire.tracing import TRACEPARENT, Tracer, tracer

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
"""How long to measure the prefill profile at the first start."""


@dataclass(slots=True)
class _StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    jobs: StepJobs


@dataclass(slots=True)
class _WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    reports: tuple[StepReport, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join the reports of two workers, which the scheduler merges."""
        assert isinstance(other, _WorkerMetadata)
        return _WorkerMetadata(self.reports + other.reports)


@dataclass(slots=True)
class _ProfileMetadata(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker measured at start. vLLM carries it to the scheduler's process."""

    profile: PrefillProfile
    joins_passes: bool


class RagCacheConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Loads the KV of chunks into vLLM's cache, and saves what vLLM computes."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._settings = EngineSettings()
        check_config(vllm_config, self._settings)
        model = vllm_config.model_config
        check_full_attention(kv_cache_config, model.max_model_len)
        folder = load_model_folder(str(model.model), model.revision)
        self._space = folder.space(
            str(model.dtype).removeprefix("torch."),
            self._settings.store_key_file,
            model.max_model_len,
            vllm_config.parallel_config.tensor_parallel_size,
        )
        check_ranks(self._space)
        self._ranks = ONE_RANK
        self._engine = EngineContext(self._settings, self._space, _make_tracer(self._settings))
        self._scheduler: ConnectorScheduler | None = None
        self._worker: ConnectorWorker | None = None
        # The exception that vLLM was already handling when the step began.
        self._outer_exception: BaseException | None = None
        self._cache: PagedCache | None = None
        self._recomputer: Recomputer | None = None
        self._joint_pass: JointPass | None = None
        if role is KVConnectorRole.SCHEDULER:
            records, costs, listen = RequestRecords(), ReuseCosts(), self._settings.records_listen
            self._feed = EngineFeed() if listen else None
            announcer = NodeAnnouncer(self._space, costs, self._feed) if self._feed else None
            client = self._store_client(range(self._space.num_ranks))
            self._scheduler = ConnectorScheduler(
                self._engine, records, client, costs, announcer, self._feed
            )
            self._record_server = None
            if listen:
                self._record_server = serve_records(
                    records, costs, listen, self._feed, self._settings.credentials
                )

    def _store_client(self, ranks: Sequence[int]) -> ShardedStore:
        settings = self._settings
        access = settings.credentials, settings.store_key_file, settings.precision.encodings
        if self._space.num_ranks > 1:
            return RankStore(settings.cachestore, ranks, *access)
        return ShardedStore(settings.cachestore, *access)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Use vLLM's block pool. vLLM calls this once, in the scheduler's process."""
        if self._scheduler is not None:
            block_size = self._vllm_config.cache_config.block_size
            self._scheduler.bind(gpu_block_pool, block_size, PrefixCacheEvents(gpu_block_pool))

    # Called in the server's process, which has no connector.

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Tell whether a pass must call the connector for each layer, so not as one CUDA graph."""
        return EngineSettings().layerwise

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Return counts that a worker sent."""
        return LoadStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> LoadMetrics:
        """Return the connector's metrics, and serve those of the process."""
        serve_metrics(EngineSettings())
        return LoadMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Called in a worker process.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Use vLLM's paged cache. vLLM calls this once, before the first request."""
        layers = self._vllm_config.compilation_config.static_forward_context
        self._ranks = Ranks(get_tp_group())
        engine = self._engine_of_rank()
        try:
            cache = PagedCache(
                {name: layers[name] for name in kv_caches},
                next(iter(kv_caches.values())).device,
                self._vllm_config.cache_config.block_size,
            )
        except ValueError as error:
            raise InvalidInput(
                "model.source",
                f"has KV that the store cannot keep: {error}",
                "name a decoder model whose layers have KV of one shape",
            ) from error
        check_layout(cache, engine.space)
        # Connects on threads of the worker half, which run on all cores (``unpinned_pool``).
        client = self._store_client((self._ranks.rank,))
        self._cache, self._recomputer = cache, self._make_recomputer()
        blend = self._make_blend_components(cache)
        if not self._ranks.all_agree(blend is not None):
            blend = None
        if blend is not None and JointPass.supports(runner := current_worker().model_runner):
            self._joint_pass = JointPass(runner, blend.recomputer)
        self._worker = ConnectorWorker(engine, cache, client, blend, self._joint_pass)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return the prefill profile. vLLM asks once, when the model is compiled and warm.

        vLLM calls nothing else before the first step, so this also waits until the loader is warm.
        Otherwise the first requests would wait, and the warm-up would slow the measurement.
        """
        if self._worker is not None:
            self._worker.wait_until_warm()
        try:
            profile = self._prefill_profile()
        except Exception:
            log.exception("connector: cannot measure the prefill profile, learning from requests")
            return None
        if profile is None:
            return None
        return _ProfileMetadata(profile, self._joint_pass is not None)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step. vLLM calls this first, before the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        self._outer_exception = sys.exc_info()[1]
        if self._worker is not None:
            self._worker.begin_step(self._jobs())
            # Start loads now, so that values arrive during the pass. With asynchronous loads vLLM
            # calls start_load_kv only after the pass.
            self._worker.start_loads(self._jobs())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: ``bind_connector_metadata`` has started the loads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for a layer of the loads. Only layer-wise loading needs this."""
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Copy a computed layer out, of the values that another engine waits for."""
        if self._worker is not None:
            self._worker.layer_done(layer_name)

    def wait_for_save(self) -> None:
        """End the forward pass. The worker saves what it computed in the background."""
        if self._worker is not None:
            # vLLM's model runner calls this even if the pass raised an exception.
            failed = sys.exc_info()[1] is not self._outer_exception
            self._worker.end_pass(self._jobs(), failed=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the ids of requests whose (observations, loads) have ended.

        Saves never delay the release of blocks.
        """
        if self._worker is None:
            return None, None
        self._worker.advance(finished_req_ids, busy=self._jobs().num_tokens > 0)
        return self._worker.take_released() or None, self._worker.take_received() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks whose load failed. vLLM recomputes from the first of them on."""
        return self._worker.take_bad_blocks() if self._worker is not None else set()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what this process counted since the last step."""
        counts = self._worker.take_counts() if self._worker is not None else LoadCounts()
        if self._scheduler is not None:
            counts += self._scheduler.take_counts()
        return LoadStats(counts.to_dict()) if counts else None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return the worker's report of this step."""
        report = self._worker.take_report() if self._worker is not None else None
        return _WorkerMetadata((report,)) if report is not None else None

    # Called in the scheduler's process.

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Use the profile that the first worker measured."""
        first = metadata.get(0)
        if self._scheduler is not None and isinstance(first, _ProfileMetadata):
            self._scheduler.on_profile(first.profile, joins_passes=first.joins_passes)

    def on_new_request(self, request: Request) -> None:
        """Start to track a new request."""
        if self._scheduler is None:
            return
        self._scheduler.on_arrival(
            ArrivedRequest(
                request.request_id,
                request.num_prompt_tokens,
                request.kv_transfer_params,
                request.block_hashes,
            )
        )
        # A LoRA changes KV, and images and embeddings have no token ids.
        has_tokens = request.prompt_token_ids and request.prompt_embeds is None
        if request.lora_request or request.mm_features or not has_tokens:
            return
        new = NewRequest(
            request.request_id,
            request.prompt_token_ids,
            request.kv_transfer_params,
            cache_salt=request.cache_salt,
            cacheable=self._is_cacheable(request),
            traceparent=(request.trace_headers or {}).get(TRACEPARENT, ""),
            block_hashes=request.block_hashes,
        )
        self._scheduler.on_new_request(new)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many more tokens can be loaded, and whether asynchronously."""
        assert self._scheduler is not None
        tokens = self._scheduler.loadable_tokens(request.request_id, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Start the load of a request, whose blocks vLLM has allocated."""
        assert self._scheduler is not None
        first = self._scheduler.approximate_from(request.request_id)
        if num_external_tokens and first is not None:
            # vLLM publishes the blocks by their hashes when the load has ended.
            salt_block_hashes(request, first // self._vllm_config.cache_config.block_size)
        self._scheduler.on_allocated(
            request.request_id, blocks.get_block_ids()[0], num_external_tokens
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the worker's jobs for the step that begins."""
        assert self._scheduler is not None
        tables = scheduler_output.kv_connector_block_state

        def blocks_of(request_id: str) -> Sequence[int]:
            groups = tables.get_block_ids(request_id) if tables is not None else None
            assert groups is not None
            blocks: list[int] = groups[0]
            return blocks

        jobs = self._scheduler.step(
            _progress(scheduler_output),
            blocks_of,
            scheduler_output.finished_req_ids,
            scheduler_output.preempted_req_ids or (),
        )
        return _StepMetadata(jobs)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Apply what the workers report after a step."""
        assert self._scheduler is not None
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, _WorkerMetadata):
            self._scheduler.on_reports(metadata.reports)
        self._scheduler.on_released(connector_output.finished_sending or ())

    def reset_cache(self) -> bool:
        """Refuse to reset the cache, because other engines use the store, too."""
        log.warning(
            "connector: the cache store is not reset. Keys are a hash of the model's folder, so"
            " put other weights into another folder and restart the engine"
        )
        return False

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Stop tracking a request. Return whether the connector still needs its blocks."""
        assert self._scheduler is not None
        return self._scheduler.on_finished(request.request_id, block_ids), None

    def shutdown(self) -> None:
        """Stop all threads and close all connections."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
            if self._record_server is not None:
                self._record_server.stop(None)
        self._engine.tracer.close()

    def _engine_of_rank(self) -> EngineContext:
        """Return the engine as this worker's rank has it: its heads, and its share of memory."""
        settings, count = self._settings, self._ranks.num_ranks
        if count > 1:
            shares = {
                "host_tier_bytes": settings.host_tier_bytes // count,
                "save_queue_bytes": settings.save_queue_bytes // count,
            }
            settings = settings.model_copy(update=shares)
        return replace(
            self._engine, settings=settings, space=self._space.of_rank(), rank=self._ranks.rank
        )

    def _make_recomputer(self) -> Recomputer | None:
        """Return None if the connector cannot run passes of its own. The engine then serves on."""
        block_size = self._vllm_config.cache_config.block_size
        try:
            model = access_model(current_worker().model_runner, block_size)
            return Recomputer(model, self._ranks)
        except Exception as error:
            log.warning(
                "connector: only exact reuse, and no prefill profile: cannot access the model"
                " error=%s",
                error,
            )
            return None

    def _make_blend_components(self, cache: PagedCache) -> BlendComponents | None:
        """Return None if this model cannot blend. The engine then serves on."""
        if self._recomputer is None:
            return None
        try:
            model = current_worker().model_runner.model
            config = self._vllm_config.model_config.hf_text_config.to_dict()
            return make_blend_components(model, self._recomputer, cache, config, self._space)
        except Exception as error:
            log.warning("connector: only exact reuse: this model cannot blend error=%s", error)
            return None

    def _prefill_profile(self) -> PrefillProfile | None:
        """Return the profile that an earlier start has saved, or measure it."""
        if self._cache is None or self._recomputer is None:
            return None
        config = self._vllm_config
        path = profile_path(
            Path(envs.VLLM_CACHE_ROOT),
            space=repr(self._space),
            vllm=vllm_version(),
            torch=torch.__version__,
            machine=processor_name(self._cache.device),
            pass_tokens=self._recomputer.max_tokens,
            max_length=config.model_config.max_model_len,
            compiled=str(config.compilation_config.mode),
        )
        profile = read_saved_profile(path)
        # Each rank takes part in the passes, so none of them measures alone.
        if not self._ranks.all_agree(profile is not None) or profile is None:
            profile = measure_profile(
                self._cache,
                self._recomputer,
                num_blocks=config.cache_config.num_gpu_blocks,
                max_length=config.model_config.max_model_len,
                budget_s=_PROFILE_BUDGET_S,
            )
            if self._ranks.is_first:
                write_profile(path, profile)
        log.info(
            "connector: prefill profile computed_tokens=%d pass_s=%.3f; after cached_tokens=%d"
            " pass_s=%.3f",
            profile.computed[-1],
            profile.seconds[0][-1],
            profile.cached[-1],
            profile.seconds[-1][-1],
        )
        return profile

    def _is_cacheable(self, request: Request) -> bool:
        """Tell whether vLLM's own prefix cache would serve a request.

        It serves no request for prompt logprobs, none that sets skip_reading_prefix_cache, and no
        pooling request. The prompt of a resumable request grows while it runs.
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


def _make_tracer(settings: EngineSettings) -> Tracer:
    if settings.otlp_endpoint is None:
        return Tracer()
    # The exporter's threads inherit the cores of the thread that starts them. Keep them off the
    # cores that vLLM computes on.
    with unpinned_pool(1, "ragcache-trace") as pool:
        return pool.submit(tracer, settings.otlp_endpoint, "engine", platform.node()).result()
