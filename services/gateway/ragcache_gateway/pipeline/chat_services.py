"""What the steps of a question work with."""

from __future__ import annotations

from dataclasses import dataclass

from ragcache_gateway.admission.slo import SloAdmission
from ragcache_gateway.admission.tenant_queue import TenantQueue
from ragcache_gateway.background.idle import IdleWindows
from ragcache_gateway.background.precompute import Precomputer
from ragcache_gateway.background.quality_gate import QualityGate
from ragcache_gateway.background.quality_trials import QualityTrials
from ragcache_gateway.chat.search_query import RewriteMode
from ragcache_gateway.engines.engine_load import EngineLoads
from ragcache_gateway.engines.pool import EnginePool
from ragcache_gateway.explain.explanation import RecentAnswers
from ragcache_gateway.planning.chunk_keys import ChunkKeys
from ragcache_gateway.planning.request_planner import RequestPlanner
from ragcache_gateway.prompts.builder import PromptThread
from ragcache_gateway.prompts.reuse_mode import ReuseMode, ServedModel
from ragcache_gateway.speculation.prefetch import StorePrefetcher
from ragcache_gateway.speculation.speculator import Speculator
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.tracing import Tracer


@dataclass(frozen=True, slots=True)
class ChatServices:
    """What the steps work with.

    Args:
        default_reuse: For requests that do not say how to reuse KV.
        default_rewrite: For requests that do not say how to make a search query.
        idle: Learns when questions arrive.
        gate: Decides whether questions may be blended.
        trials: Learn from answered questions; None: no quality target is set.
        precomputer: Learns which chunks questions lacked; None: precomputing is off.
        speculator: Computes prompts during searches; None: speculation is off.
        prefetcher: Moves stored KV from disk into memory during searches.
        recent_answers: Keeps answers to explain them.
        planner: Chooses the order of documents and the engine.
        chunk_keys: Used where ``prompts`` is, in its thread.
        loads: Learn how long requests wait in engines.
        tenant_queue: Orders the requests of tenants that ask at once.
        reordering_window_ms: Questions sent this much later may go first in an engine's queue.
        slo: Refuses questions that are predicted to exceed a limit on latency.
    """

    model: ServedModel
    default_reuse: ReuseMode
    default_rewrite: RewriteMode
    prompts: PromptThread
    retriever: RetrieverClient
    engines: EnginePool
    idle: IdleWindows
    gate: QualityGate
    trials: QualityTrials | None
    precomputer: Precomputer | None
    speculator: Speculator | None
    prefetcher: StorePrefetcher
    recent_answers: RecentAnswers
    planner: RequestPlanner
    chunk_keys: ChunkKeys
    loads: EngineLoads
    tenant_queue: TenantQueue
    reordering_window_ms: int
    slo: SloAdmission
    metrics: Metrics
    tracer: Tracer
