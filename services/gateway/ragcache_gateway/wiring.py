"""What request handlers work with, built once per process."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from ragcache_core.identity.keys import KVSpace
from ragcache_core.plan.prompt import DEFAULT_SYSTEM_PROMPT
from ragcache_gateway.background.idle import IdleTime
from ragcache_gateway.background.precompute import Precompute, Target
from ragcache_gateway.background.quality_trials import QualityTrials
from ragcache_gateway.chat.pipeline import DOMAIN, Answerer
from ragcache_gateway.documents.deletions import Deletions
from ragcache_gateway.documents.invalidation import StoredVariants
from ragcache_gateway.engines.completion import probe_body
from ragcache_gateway.engines.pool import Engines
from ragcache_gateway.http.readiness import Readiness
from ragcache_gateway.prompts.builder import PromptBuilder
from ragcache_gateway.prompts.conversation import Conversation
from ragcache_gateway.prompts.reuse_mode import Reuse
from ragcache_gateway.status.metrics import Metrics
from ragcache_kv.store_client.sharded import AsyncShardedStore
from ragcache_wire.clients.health_client import HealthClient
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.tracing import Tracer


@dataclass(frozen=True, slots=True)
class Parts:
    """The gateway's inside."""

    config: GatewaySettings
    metrics: Metrics
    retriever: RetrieverClient
    store: AsyncShardedStore
    answerer: Answerer
    variants: StoredVariants
    precompute: Precompute | None
    trials: QualityTrials | None
    readiness: Readiness


@asynccontextmanager
async def connected(
    config: GatewaySettings,
    space: KVSpace,
    prompts: PromptBuilder,
    metrics: Metrics,
    tracer: Tracer,
) -> AsyncGenerator[Parts, None]:
    """Parts with their clients, which are closed at the end, and engines watched meanwhile."""
    async with AsyncExitStack() as stack:
        retriever = RetrieverClient(config.retriever)
        stack.push_async_callback(retriever.close)
        health = HealthClient("retriever", config.retriever)
        stack.push_async_callback(health.close)
        store = AsyncShardedStore(config.cachestore)
        stack.push_async_callback(store.close)
        deletions = Deletions(store, metrics)
        deletions.start()
        stack.push_async_callback(deletions.close)
        tokenizing = ThreadPoolExecutor(1, "tokenizing")
        stack.callback(tokenizing.shutdown, wait=False, cancel_futures=True)

        # The head of every prompt: the probe warms what all answers begin with.
        frame = prompts.frame(Conversation(DEFAULT_SYSTEM_PROMPT, (), "?"))
        probe = probe_body(config.model_name, frame.head or [0])
        engines = Engines(config, probe, metrics, tracer)
        stack.push_async_callback(engines.close)
        await engines.start()
        idle = IdleTime(engines)
        precompute = None
        if config.precompute:
            precompute = Precompute(
                Target(
                    model=config.model_name,
                    max_model_len=config.max_model_len,
                    space=space,
                    domain=DOMAIN,
                    template=frame,
                    reuse=config.reuse,
                ),
                prompts=prompts,
                tokenizing=tokenizing,
                engines=engines,
                idle=idle,
                store=store,
                metrics=metrics,
                plan_keys=config.signing_key_file,
            )
            precompute.start()
            stack.push_async_callback(precompute.close)
        trials = None
        if config.quality is not None:
            trials = QualityTrials(
                quality=config.quality,
                budget=config.max_recompute_share,
                model=config.model_name,
                max_model_len=config.max_model_len,
                space=space,
                domain=DOMAIN,
                engines=engines,
                idle=idle,
                metrics=metrics,
                plan_keys=config.signing_key_file,
            )
            trials.start()
            stack.push_async_callback(trials.close)

        yield Parts(
            config=config,
            metrics=metrics,
            retriever=retriever,
            store=store,
            answerer=Answerer(
                model=config.model_name,
                space=space,
                reuse=Reuse(config.reuse, config.max_recompute_share),
                prompts=prompts,
                tokenizing=tokenizing,
                retriever=retriever,
                engines=engines,
                trials=trials,
                metrics=metrics,
                tracer=tracer,
                plan_keys=config.signing_key_file,
                answered=precompute.answered if precompute is not None else None,
            ),
            variants=StoredVariants(
                deletions=deletions,
                prompts=prompts,
                tokenizing=tokenizing,
                space=space,
                domain=DOMAIN,
            ),
            precompute=precompute,
            trials=trials,
            readiness=Readiness(engines, health),
        )


def _parts_of(request: Request) -> Parts:
    parts: Parts = request.app.state.parts
    return parts


PartsOf = Annotated[Parts, Depends(_parts_of)]
