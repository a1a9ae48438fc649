"""vLLM in this process, with the connector and a cache store in a process of its own.

In one process the checks can read the KV of vLLM's blocks and time each step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.completion import record_of
from harness.plans import blend_for_all, exact_for_all
from harness.processes import (
    KV_TRANSFER,
    CacheStore,
    Engine,
    Service,
    free_port,
    start_cachestore,
    vllm_cache_root,
)
from ragcache_core.blend.observation import observation_key
from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.identity.variant import Miss
from ragcache_core.plan.prompt import Prompt
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_core.plan.segments import checked_segments
from ragcache_core.store_api import LookupKey
from ragcache_kv.model.folder import load_model_folder
from ragcache_kv.store_client.client import StoreClient
from ragcache_wire.v1 import engine_pb2

DOMAIN = "public"
STORED_S = 45.0
STEP_LIMIT_S = 60.0
"""Longest wait for one request."""

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Options:
    """How to start vLLM.

    Attributes:
        model: Model folder.
        folder: For the store's data, caches and logs.
        device: ``cuda`` or ``cpu``.
        eager: Neither compile nor use CUDA graphs.
        max_length: Longest prompt and answer, in tokens.
        pass_tokens: Most tokens of one pass.
        kv_bytes: Size of vLLM's KV cache.
        store_bytes: Memory of the cache store.
        shared_memory: Whether the store offers shared memory; otherwise values come over TCP.
        attention: Attention backend, or None for vLLM's choice.
        settings: Further environment of the connector.
    """

    model: Path
    folder: Path
    device: str
    eager: bool
    max_length: int
    pass_tokens: int
    kv_bytes: int
    store_bytes: int
    shared_memory: bool
    attention: str | None = None
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request generated.

    Attributes:
        token_ids: The generated tokens.
        ttft_s: Seconds to the first one.
        lead: Smallest lead in log-probability of a generated token over the second most likely
            one. Infinite unless asked for.
        request: vLLM's id.
    """

    token_ids: tuple[int, ...]
    ttft_s: float
    lead: float
    request: str


class InProcessEngine:
    """A running engine. ``blocks`` is the block table that each request was allocated last."""

    def __init__(self, options: Options, store: CacheStore, llm: Any, records: str) -> None:
        self.options, self.store = options, store
        self.space: KVSpace = load_model_folder(str(options.model)).space("bfloat16")
        self.blocks: dict[str, tuple[int, ...]] = {}
        self.on_load: Callable[[], None] = lambda: None
        """Called once a load's blocks are allocated, before it starts."""
        self.llm = llm
        self._engine = llm.llm_engine
        self._records = records
        self._client = StoreClient(store.address)
        self._watch_allocations()

    @property
    def core(self) -> Any:
        """vLLM's EngineCore."""
        return self._engine.engine_core.engine_core

    @property
    def config(self) -> Any:
        """vLLM's configuration."""
        return self._engine.vllm_config

    @property
    def runner(self) -> Any:
        """vLLM's model runner."""
        from ragcache_engine.plugin import current_worker  # noqa: PLC0415

        return current_worker().model_runner

    def ask(
        self,
        prompt: Prompt,
        plan: ReusePlan | None = None,
        *,
        max_tokens: int = 1,
        salt: str | None = None,
        logprobs: bool = False,
    ) -> Answer:
        """Answer one request alone. ``salt``: requests with the same one share the prefix cache."""
        started = time.perf_counter()
        request = self.start(
            prompt.token_ids, plan, max_tokens=max_tokens, salt=salt, logprobs=logprobs
        )
        first = None
        while True:
            for output in self.step():
                if output.request_id == request and output.outputs[0].token_ids and first is None:
                    first = time.perf_counter()
                if output.request_id == request and output.finished:
                    assert first is not None
                    done = output.outputs[0]
                    lead = _lead(done.logprobs) if logprobs else float("inf")
                    return Answer(tuple(done.token_ids), first - started, lead, request)
            if time.perf_counter() - started > STEP_LIMIT_S:
                raise TimeoutError(f"no answer within {STEP_LIMIT_S:.0f} s")

    def start(
        self,
        token_ids: Sequence[int],
        plan: ReusePlan | None = None,
        *,
        max_tokens: int = 1,
        salt: str | None = None,
        logprobs: bool = False,
    ) -> str:
        """Add a request, which the next steps run; return its id."""
        from vllm import SamplingParams  # noqa: PLC0415

        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2 if logprobs else None
        )
        if plan is not None:
            params.extra_args = {"kv_transfer_params": {"ragcache": plan.encode()}}
        request = uuid.uuid4().hex
        prompt = {"prompt_token_ids": list(token_ids), "cache_salt": salt or request}
        self._engine.add_request(request, prompt, params)
        return request

    def step(self) -> list[Any]:
        """Run one step of vLLM, and return what it output."""
        return list(self._engine.step())

    def reset(self) -> None:
        """Empty vLLM's own prefix cache."""
        self.run_until(self.is_idle, "earlier requests did not end")
        self.llm.reset_prefix_cache()

    def abort(self, request: str) -> None:
        """Abort a request, as a client that disconnects does."""
        self._engine.abort_request([request])

    def run_until(
        self, condition: Callable[[], bool], what: str, limit_s: float = STORED_S
    ) -> None:
        """Step until a condition is true. Raises TimeoutError with ``what`` is missing."""
        deadline = time.monotonic() + limit_s
        while not condition():
            self.step()
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {limit_s:.0f} s: {what}")
            time.sleep(0.001)

    def exact_plan(self, prompt: Prompt) -> ReusePlan:
        """Return a plan that loads and saves exact values."""
        return exact_for_all(prompt, self.space, DOMAIN, uuid.uuid4().hex)

    def blend_plan(self, prompt: Prompt, share: float) -> ReusePlan:
        """Return a plan that blends chunks."""
        return blend_for_all(prompt, self.space, DOMAIN, uuid.uuid4().hex, share)

    def record(self, plan: ReusePlan) -> engine_pb2.RequestRecord:
        """Return the engine's record of a request by its plan."""
        return record_of(Engine(self.store.service, "", self._records), plan.request)

    def variants(self, prompt: Prompt) -> list[VariantKey]:
        """Return the keys of the head and the chunks as this prompt computes them."""
        plan = self.exact_plan(prompt)
        return [one.variant for one in checked_segments(plan, prompt.token_ids, self.space)]

    def wait_until_stored(self, prompt: Prompt, *, observed: bool = False) -> None:
        """Step until the store has all values of a prompt, and observations of its chunks."""
        keys = self.variants(prompt)
        wants = [LookupKey.for_variant(key) for key in keys]
        if observed:
            wants += [LookupKey.for_variant(observation_key(key)) for key in keys[1:]]

        def is_stored() -> bool:
            return all(one.stored for one in self._client.lookup(wants, STORED_S).variants)

        what = "the store lacks values or observations of the prompt"
        self.run_until(is_stored, what)

    def stored(self, prompt: Prompt) -> list[Any]:
        """Return the stored values of a prompt's segments, as tensors on the CPU."""
        from ragcache_engine.kv_cache.value_tensors import decode  # noqa: PLC0415

        found = []
        for _, value in self._client.get(self.variants(prompt), timeout_s=STORED_S):
            tensor = None
            if not isinstance(value, Miss):
                tensor = decode(value, value.info.num_tokens, self.space)
            if tensor is None:
                raise LookupError(f"not stored, or in another layout: {value}")
            found.append(tensor.clone())
        return found

    def kv(self, request: str, count: int) -> Any:
        """Return the KV of the first tokens of a request that has just ended.

        Returns:
            [layers, 2, count, KV heads, head_dim] on the CPU.
        """
        return self.cache().read(self.blocks[request], 0, count)

    def cache(self) -> Any:
        """Return access to vLLM's paged cache."""
        from ragcache_engine.blend.recomputer import access_model  # noqa: PLC0415
        from ragcache_engine.kv_cache.paged_cache import PagedCache  # noqa: PLC0415

        model = access_model(self.runner, self.config.cache_config.block_size)
        layers = self.config.compilation_config.static_forward_context
        size = self.config.cache_config.block_size
        return PagedCache({name: layers[name] for name in model.layer_names}, model.device, size)

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the KV cache that no request uses."""
        free: int = self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free

    def is_idle(self) -> bool:
        """Whether no request runs or waits, and none is being cleaned up."""
        return not self.core.scheduler.has_requests()

    def facts(self) -> dict[str, Any]:
        """Return what vLLM has chosen."""
        groups = [group for of_cache in self.runner.attn_groups for group in of_cache]
        compilation = self.config.compilation_config
        layer = next(iter(compilation.static_forward_context.values()))
        return {
            "runner": type(self.runner).__module__,
            "async_scheduling": bool(self.config.scheduler_config.async_scheduling),
            "attention": groups[0].backend.get_name(),
            "block_size": self.config.cache_config.block_size,
            "kv_strides": list(layer.kv_cache.stride()),
            "num_blocks": self.config.cache_config.num_gpu_blocks,
            "graphs": str(compilation.cudagraph_mode),
            "compilation": str(compilation.mode),
            "blends": self.core.scheduler.connector is not None and self._blends(),
        }

    def close(self) -> None:
        """Shut vLLM down."""
        self._client.close()
        self._engine.engine_core.shutdown()

    def _blends(self) -> bool:
        from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415

        from ragcache_engine.plugin import current_worker  # noqa: PLC0415

        assert current_worker() is not None
        return get_kv_transfer_group()._recomputer is not None

    def _watch_allocations(self) -> None:
        half = self.core.scheduler.connector
        allocate = half.update_state_after_alloc

        def watching(request: Any, blocks: Any, num_external_tokens: int) -> None:
            ours = request.request_id[: len(uuid.uuid4().hex)]  # vLLM adds a suffix
            self.blocks[ours] = tuple(blocks.get_block_ids()[0])
            if num_external_tokens:
                self.on_load()
            allocate(request, blocks, num_external_tokens)

        half.update_state_after_alloc = watching


@contextlib.contextmanager
def running_engine(options: Options) -> Iterator[InProcessEngine]:
    """Start a store and vLLM, and stop both at the end."""
    store = start_cachestore(
        options.folder / "store",
        memory_bytes=options.store_bytes,
        shared=options.shared_memory,
    )
    try:
        engine = _start(options, store)
        try:
            yield engine
        finally:
            engine.close()
    finally:
        store.service.stop()


def _start(options: Options, store: CacheStore) -> InProcessEngine:
    records = f"127.0.0.1:{free_port()}"
    os.environ |= {
        "RAGCACHE_CACHESTORE": store.address,
        "RAGCACHE_RECORDS_LISTEN": records,
        # Small models are computed as fast as they are loaded, and loads are measured here.
        "RAGCACHE_LOAD_ALWAYS": "on",
        "RAGCACHE_PLAIN_PREFIXES": "off",
        "RAGCACHE_SAVE_QUEUE_BYTES": str(4 * GIB),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(vllm_cache_root(options.folder)),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # flashinfer is not in the packed folder
        **options.settings,
    }
    from ragcache_engine.plugin import register  # noqa: PLC0415

    register()  # the folder has no entry point of an installed package
    from vllm import LLM  # noqa: PLC0415

    arguments: dict[str, Any] = {
        "model": str(options.model),
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "enforce_eager": options.eager,
        "max_model_len": options.max_length,
        "max_num_batched_tokens": options.pass_tokens,
        "disable_log_stats": True,
        "seed": 0,
        "kv_transfer_config": dict(KV_TRANSFER),
    }
    if options.device == "cuda":
        arguments |= {
            "kv_cache_memory_bytes": options.kv_bytes,
            "gpu_memory_utilization": 0.3,
            # Batches of the checks. Each further size takes part of a second at the start.
            "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
        }
        if options.attention:
            arguments["attention_backend"] = options.attention
    return InProcessEngine(options, store, LLM(**arguments), records)


def engine_arguments() -> argparse.ArgumentParser:
    """Return the arguments that programs with an engine share."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--attention")
    parser.add_argument("--no-compile", action="store_true")
    return parser


def frozen(service: Service) -> contextlib.AbstractContextManager[None]:
    """Thaw a process at the end, which something inside freezes."""

    @contextlib.contextmanager
    def thawing() -> Iterator[None]:
        try:
            yield
        finally:
            service.thaw()

    return thawing()


def _lead(logprobs: Any) -> float:
    """Return the smallest lead of the most likely token of each position."""
    leads = []
    for position in logprobs:
        best, second, *_ = sorted((one.logprob for one in position.values()), reverse=True)
        leads.append(best - second)
    return min(leads)
