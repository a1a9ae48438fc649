"""The class that vLLM makes: translates its connector interface to the two sides.

vLLM makes one object for the scheduler and one for every worker, in different processes on CPU.
Loads are asynchronous: vLLM parks the request and other requests keep running. All saving happens
after the forward pass, so the per-layer hooks stay unused and CUDA graphs stay whole.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from ragcache_core.errors import InvalidInput
from ragcache_core.keys import KVSpace
from ragcache_engine.blender import Blender, blender
from ragcache_engine.config import EngineConfig
from ragcache_engine.metrics import LoadMetrics, LoadStats
from ragcache_engine.paged_cache import PagedCache
from ragcache_engine.plugin import SUPPORTED_VLLM, is_supported, vllm_version, worker
from ragcache_engine.records import RecordBook, serve
from ragcache_engine.salting import salt
from ragcache_engine.scheduler_side import SchedulerSide
from ragcache_engine.transfer import StepJobs, StepReport
from ragcache_engine.worker_side import WorkerSide
from ragcache_kv.model_folder import load_model_folder
from ragcache_kv.store.sharded import ShardedStore

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
        report = StepReport(mine.outcomes + others.outcomes, mine.passes + others.passes)
        return _WorkerMetadata(report)


class RagCacheConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Chunk-caches for an unpatched vLLM; see the module's docstring."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _refuse_unsupported(vllm_config)
        self._config = EngineConfig.from_env(os.environ)
        self._space = _kv_space(vllm_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            book = RecordBook()
            client = ShardedStore(self._config.cachestore)
            self._scheduler = SchedulerSide(self._config, self._space, book, client)
            self._records = (
                serve(book, self._config.records_listen) if self._config.records_listen else None
            )

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Learn of the pool of blocks; vLLM calls it once, in the scheduler's process."""
        if self._scheduler is not None:
            self._scheduler.bind(gpu_block_pool, self._vllm_config.cache_config.block_size)

    # The server's process, where there is no connector.

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
            {name: layers[name] for name in kv_caches}, next(iter(kv_caches.values())).device
        )
        _check_layout(cache, self._space, self._vllm_config.cache_config.block_size)
        # Connects on the worker side's own threads, which are bound to no core (``threads``).
        client = ShardedStore(self._config.cachestore)
        self._worker = WorkerSide(self._config, self._space, cache, client, self._blender(cache))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins; vLLM calls this first, ahead of the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin_step()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's loads; called on every step."""
        if self._worker is not None:
            self._worker.start_loads(self._jobs())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads end before their request is scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to do per layer: saving reads the cache after the forward pass."""

    def wait_for_save(self) -> None:
        """Copy out what became whole in this step; sending it happens in the background."""
        if self._worker is not None:
            self._worker.save(self._jobs())

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
        """What became of loads since the last step, for vLLM's metrics and log."""
        counts = self._worker.take_counts() if self._worker is not None else None
        return LoadStats(counts.to_dict()) if counts else None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What the scheduler side should know of this step."""
        report = self._worker.take_report() if self._worker is not None else None
        return _WorkerMetadata(report) if report is not None else None

    # Scheduler process.

    def on_new_request(self, request: Request) -> None:
        """A request arrived."""
        # LoRA changes KV, images and embeddings have no token ids: neither has chunk-caches.
        plain = not request.lora_request and not request.mm_features and request.prompt_token_ids
        if self._scheduler is not None and plain:
            self._scheduler.on_new_request(
                request.request_id, request.prompt_token_ids, request.kv_transfer_params
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
            salt(request, first // self._vllm_config.cache_config.block_size)
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

        return _StepMetadata(self._scheduler.step(_progress(scheduler_output), blocks_of))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """A step ended in the workers."""
        assert self._scheduler is not None
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, _WorkerMetadata):
            self._scheduler.on_passes(report.report.passes)
            self._scheduler.on_outcomes(report.report.outcomes)
        self._scheduler.on_released(connector_output.finished_sending or ())

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

    def _blender(self, cache: PagedCache) -> Blender | None:
        """None where this model cannot be blended, which is no reason not to serve it."""
        config = load_model_folder(str(self._vllm_config.model_config.model)).config
        try:
            return blender(worker().model_runner, cache, config, self._space)
        except Exception as error:
            log.warning("chunks are reused behind their own prefix only: %s", error)
            return None

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


def _refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Refuse at start, in words, what would go wrong later. Raises InvalidInput."""
    installed = vllm_version()
    if not is_supported(installed):
        raise InvalidInput("vllm", f"is version {installed}", f"install {SUPPORTED_VLLM}.x")
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
    if vllm_config.cache_config.cache_dtype != "auto":
        raise InvalidInput(
            "engines[].args", "set --kv-cache-dtype", "leave it out: KV is kept in the model's type"
        )
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        raise InvalidInput(
            "kv_load_failure_policy",
            f"is {policy!r}",
            "set it to recompute: a lost cache is no error",
        )


def _kv_space(vllm_config: VllmConfig) -> KVSpace:
    model = vllm_config.model_config
    return load_model_folder(str(model.model)).space(str(model.dtype).removeprefix("torch."))


def _check_layout(cache: PagedCache, space: KVSpace, block_size: int) -> None:
    """Keys are made from config.json; what vLLM allocated must agree. Raises InvalidInput.

    block_size: of the block tables that vLLM hands out.
    """
    shape = cache.shape
    if shape.block_size != block_size:
        raise InvalidInput(
            "engines[].args",
            f"make blocks of {block_size} tokens, which the attention backend cuts into"
            f" {shape.block_size}",
            f"set --block-size {shape.block_size}",
        )
    dtype = str(shape.dtype).removeprefix("torch.")
    found = (cache.num_layers, shape.num_kv_heads, shape.head_dim, dtype)
    wanted = (space.num_layers, space.num_kv_heads, space.head_dim, space.dtype)
    if found != wanted:
        raise InvalidInput(
            "model.source",
            f"has KV of (layers, heads, head_dim, dtype) {found}, its config.json says {wanted}",
            "name a decoder model with ordinary attention in every layer",
        )
