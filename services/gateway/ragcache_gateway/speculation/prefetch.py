"""Moves what an early stage of a search names from the cache store's disk into its memory.

It takes no time of an engine, so it does not depend on ``speculation``. It takes time of the
gateway: the prompt of the stage is built. So that happens once for a question, for a stage that is
probably final, and only if the cache view has one of its chunks on a disk and in no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from ragcache_core.errors import RagCacheError
from ragcache_core.identity.keys import KVSpace
from ragcache_core.plan.prompt import Prompt
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_core.plan.segments import checked_segments
from ragcache_core.planner.request_plan import ChunkAction
from ragcache_core.planner.speculation import LEAST_SAVING_S, remaining_search_s
from ragcache_gateway.engines.completion import plan_of
from ragcache_gateway.planning.request_planner import RequestPlanner
from ragcache_gateway.speculation.interim_stage import InterimStage, PrefillSteps
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_kv.store_client.async_sharded import AsyncShardedStore
from ragcache_wire.tracing import Tracer

log = logging.getLogger(__name__)

PREFETCH_PROBABILITY = 0.5
"""A stage that is final with this probability has its chunks brought into the store's memory."""


class StorePrefetcher:
    """What all questions of a gateway share to prefetch. For one event loop."""

    def __init__(
        self,
        planner: RequestPlanner,
        store: AsyncShardedStore,
        space: KVSpace,
        metrics: Metrics,
        tracer: Tracer,
    ) -> None:
        self.planner = planner
        self._store = store
        self._space = space
        self._metrics = metrics
        self._tracer = tracer

    async def prefetch(self, body: Mapping[str, Any], prompt: Prompt) -> None:
        """Have the store bring what a request could load from disk into memory. Never raises."""
        plan = ReusePlan.decode(plan_of(body))
        segments = checked_segments(plan, prompt.token_ids, self._space)
        with self._tracer.start_step("prefetch") as span, span.current():
            started = await self._store.prefetch([named.variant for named in segments])
            span.set(variants=len(segments), started=started)
        self._metrics.speculation_prefetched.inc(started)


class StagePrefetch:
    """The prefetch of one question. It is an async context; at its end a running one is ended."""

    def __init__(self, prefetcher: StorePrefetcher, steps: PrefillSteps) -> None:
        self._prefetcher = prefetcher
        self._steps = steps
        self._has_prefetched = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> StagePrefetch:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    def on_stage(self, stage: InterimStage) -> None:
        """Prefetch a stage beside the search, if it is probable enough."""
        if self._task is None and self._may_prefetch(stage):
            self._task = asyncio.create_task(self._run(stage))

    async def prefetch(self, stage: InterimStage) -> None:
        """Prefetch a stage, unless an earlier one was prefetched or nothing can be gained.

        Raises:
            RagCacheError: The prompt cannot be built.
        """
        if not self._may_prefetch(stage):
            return
        chunks = await self._steps.chunk_keys(stage)
        if not self._prefetcher.planner.is_on_disk_only(chunks):
            return
        self._has_prefetched = True
        staged = await self._steps.build(stage, ())
        if all(one.action is ChunkAction.CACHED for one in staged.plan.decisions):
            return  # the engine needs no load
        body = await self._steps.request(stage, staged.answer)
        await self._prefetcher.prefetch(body, staged.answer.prompt)

    def _may_prefetch(self, stage: InterimStage) -> bool:
        remaining_s = remaining_search_s(stage.progress, stage.search_s, stage.elapsed_s, 0.0)
        is_probable = stage.final_probability >= PREFETCH_PROBABILITY
        return is_probable and remaining_s > LEAST_SAVING_S and not self._has_prefetched

    async def _run(self, stage: InterimStage) -> None:
        try:
            # If the prompt cannot be built, the question itself reports it.
            with contextlib.suppress(RagCacheError):
                await self.prefetch(stage)
        except Exception:
            # The question is answered without it.
            log.exception("prefetch: stopped")
