"""What request handlers work with, built once per process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from ragcache_core.keys import KVSpace
from ragcache_core.prompt import DEFAULT_SYSTEM_PROMPT
from ragcache_gateway.answer import DOMAIN, Answerer
from ragcache_gateway.completion import probe_body
from ragcache_gateway.config import Config
from ragcache_gateway.conversation import Conversation
from ragcache_gateway.engine import Engine, watch
from ragcache_gateway.metrics import Metrics
from ragcache_gateway.prompt import PromptBuilder
from ragcache_gateway.readiness import Readiness
from ragcache_gateway.variants import StoredVariants
from ragcache_wire.cachestore_client import AsyncCacheStoreClient
from ragcache_wire.engine_client import EngineClient
from ragcache_wire.health_client import HealthClient
from ragcache_wire.retriever_client import RetrieverClient


@dataclass(frozen=True, slots=True)
class Parts:
    """The gateway's inside."""

    config: Config
    metrics: Metrics
    retriever: RetrieverClient
    answerer: Answerer
    variants: StoredVariants
    readiness: Readiness


@asynccontextmanager
async def connected(
    config: Config, space: KVSpace, prompts: PromptBuilder, metrics: Metrics
) -> AsyncGenerator[Parts, None]:
    """Parts with their clients, which are closed at the end, and the engine watched meanwhile."""
    async with AsyncExitStack() as stack:
        retriever = RetrieverClient(config.retriever)
        stack.push_async_callback(retriever.close)
        health = HealthClient("retriever", config.retriever)
        stack.push_async_callback(health.close)
        records = EngineClient(config.engine_records)
        stack.push_async_callback(records.close)
        store = AsyncCacheStoreClient(config.cachestore)
        stack.push_async_callback(store.close)
        engine = Engine(config)
        stack.push_async_callback(engine.close)
        tokenizing = ThreadPoolExecutor(1, "tokenizing")
        stack.callback(tokenizing.shutdown, wait=False, cancel_futures=True)

        # The head of every prompt: the probe warms what all answers begin with.
        head = prompts.frame(Conversation(DEFAULT_SYSTEM_PROMPT, (), "?")).head
        probe = probe_body(config.model_name, head or [0])
        watching = asyncio.create_task(watch(engine, probe, config.engine_watch_s))
        stack.push_async_callback(_cancel, watching)

        yield Parts(
            config=config,
            metrics=metrics,
            retriever=retriever,
            answerer=Answerer(
                model=config.model_name,
                space=space,
                prompts=prompts,
                tokenizing=tokenizing,
                retriever=retriever,
                engine=engine,
                records=records,
                metrics=metrics,
            ),
            variants=StoredVariants(
                store=store,
                prompts=prompts,
                tokenizing=tokenizing,
                space=space,
                domain=DOMAIN,
                metrics=metrics,
            ),
            readiness=Readiness(engine, health),
        )


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _parts_of(request: Request) -> Parts:
    parts: Parts = request.app.state.parts
    return parts


PartsOf = Annotated[Parts, Depends(_parts_of)]
