"""Builds the gateway's services and connects them to each other."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from ragcache_core.identity.keys import KVSpace, token_digest
from ragcache_core.plan.prompt import DEFAULT_SYSTEM_PROMPT
from ragcache_gateway.background.idle import IdleWindows
from ragcache_gateway.background.precompute import Precomputer
from ragcache_gateway.background.quality_gate import QualityGate
from ragcache_gateway.background.quality_trials import QualityTrials
from ragcache_gateway.chat.pipeline import ChatServices
from ragcache_gateway.documents.delete_sender import DeleteSender
from ragcache_gateway.documents.removal_feed import RemovalFeed
from ragcache_gateway.documents.writer import DocumentWriter
from ragcache_gateway.engines.completion import probe_body
from ragcache_gateway.engines.pool import EnginePool
from ragcache_gateway.extraction.extractor import TextExtractor
from ragcache_gateway.http.parts_watch import PartsWatch
from ragcache_gateway.http.services import GatewayServices
from ragcache_gateway.prompts.builder import PromptBuilder, TemplateFrame
from ragcache_gateway.prompts.conversation import Conversation
from ragcache_gateway.prompts.reuse_mode import ReuseMode
from ragcache_gateway.prompts.served_model import ServedModel
from ragcache_gateway.status.metrics import Metrics
from ragcache_kv.store_client.async_sharded import AsyncShardedStore
from ragcache_wire.clients.health_client import HealthClient
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.tracing import Tracer


@dataclass(frozen=True, slots=True)
class _Tools:
    """What every service is built with. The stack closes the services at the end."""

    settings: GatewaySettings
    model: ServedModel
    prompts: PromptBuilder
    tokenizing: Executor
    metrics: Metrics
    tracer: Tracer
    stack: AsyncExitStack


@dataclass(frozen=True, slots=True)
class _Clients:
    """Connections to the other components, apart from the engines."""

    retriever: RetrieverClient
    retriever_health: HealthClient
    store: AsyncShardedStore


@asynccontextmanager
async def connect_services(
    settings: GatewaySettings,
    space: KVSpace,
    prompts: PromptBuilder,
    metrics: Metrics,
    tracer: Tracer,
) -> AsyncGenerator[GatewayServices, None]:
    """Build and start every service; stop them at the end."""
    async with AsyncExitStack() as stack:
        model = ServedModel(
            name=settings.model_name,
            max_model_len=settings.max_model_len,
            space=space,
            plan_keys=settings.signing_key_file,
        )
        clients = _connect_clients(settings, stack)
        tokenizing = ThreadPoolExecutor(1, "tokenizing")
        stack.callback(tokenizing.shutdown, wait=False, cancel_futures=True)
        tools = _Tools(settings, model, prompts, tokenizing, metrics, tracer, stack)
        removals = RemovalFeed(clients.retriever)
        deletes = _start_deletes(tools, clients)
        template = prompts.frame(Conversation(DEFAULT_SYSTEM_PROMPT, (), "?"))
        engines = await _start_engines(tools, template)
        idle = IdleWindows(engines, metrics)
        precomputer = _start_precomputer(tools, template, engines, idle, clients, removals)
        trials = _start_trials(tools, engines, idle, removals)
        gate = _start_gate(tools, template, clients, trials)
        writer = _document_writer(clients, removals, deletes, precomputer, trials)
        extractor = TextExtractor()
        stack.push_async_callback(extractor.close)
        await removals.start()
        stack.push_async_callback(removals.close)
        yield GatewayServices(
            settings=settings,
            metrics=metrics,
            chat=ChatServices(
                model=model,
                default_reuse=ReuseMode(settings.reuse, settings.max_recompute_share),
                prompts=prompts,
                tokenizing=tokenizing,
                retriever=clients.retriever,
                engines=engines,
                idle=idle,
                gate=gate,
                trials=trials,
                precomputer=precomputer,
                metrics=metrics,
                tracer=tracer,
            ),
            documents=writer,
            extractor=extractor,
            retriever=clients.retriever,
            store=clients.store,
            parts_watch=_start_parts_watch(tools, engines, clients),
        )


def _connect_clients(settings: GatewaySettings, stack: AsyncExitStack) -> _Clients:
    retriever = RetrieverClient(settings.retriever)
    stack.push_async_callback(retriever.close)
    health = HealthClient("retriever", settings.retriever)
    stack.push_async_callback(health.close)
    store = AsyncShardedStore(settings.cachestore)
    stack.push_async_callback(store.close)
    return _Clients(retriever, health, store)


def _start_deletes(tools: _Tools, clients: _Clients) -> DeleteSender:
    deletes = DeleteSender(
        tools.model, retriever=clients.retriever, store=clients.store, metrics=tools.metrics
    )
    deletes.start()
    tools.stack.push_async_callback(deletes.close)
    return deletes


async def _start_engines(tools: _Tools, template: TemplateFrame) -> EnginePool:
    # Most prompts begin with the template's head, so the probe caches it in the engine.
    probe = probe_body(tools.model.name, template.head or [0])
    engines = EnginePool(tools.settings, probe, tools.metrics, tools.tracer)
    tools.stack.push_async_callback(engines.close)
    await engines.start()
    return engines


def _start_parts_watch(tools: _Tools, engines: EnginePool, clients: _Clients) -> PartsWatch:
    watch = PartsWatch(engines, clients.retriever_health, tools.settings.engine_watch_s)
    watch.start()
    tools.stack.push_async_callback(watch.close)
    return watch


def _start_precomputer(
    tools: _Tools,
    template: TemplateFrame,
    engines: EnginePool,
    idle: IdleWindows,
    clients: _Clients,
    removals: RemovalFeed,
) -> Precomputer | None:
    if not tools.settings.precompute:
        return None
    precomputer = Precomputer(
        tools.model,
        template,
        tools.settings.reuse,
        prompts=tools.prompts,
        tokenizing=tools.tokenizing,
        engines=engines,
        idle=idle,
        store=clients.store,
        retriever=clients.retriever,
        removals=removals,
        metrics=tools.metrics,
    )
    precomputer.start()
    tools.stack.push_async_callback(precomputer.close)
    return precomputer


def _start_trials(
    tools: _Tools, engines: EnginePool, idle: IdleWindows, removals: RemovalFeed
) -> QualityTrials | None:
    if tools.settings.quality is None:
        return None
    trials = QualityTrials(
        tools.model,
        quality=tools.settings.quality,
        max_recompute_share=tools.settings.max_recompute_share,
        engines=engines,
        idle=idle,
        removals=removals,
        metrics=tools.metrics,
    )
    trials.start()
    tools.stack.push_async_callback(trials.close)
    return trials


def _start_gate(
    tools: _Tools, template: TemplateFrame, clients: _Clients, trials: QualityTrials | None
) -> QualityGate:
    gate = QualityGate(
        tools.model,
        token_digest(template.head).hex(),
        wanted_quality=tools.settings.quality,
        max_recompute_share=tools.settings.max_recompute_share,
        retriever=clients.retriever,
        trials=trials,
    )
    gate.start()
    tools.stack.push_async_callback(gate.close)
    return gate


def _document_writer(
    clients: _Clients,
    removals: RemovalFeed,
    deletes: DeleteSender,
    precomputer: Precomputer | None,
    trials: QualityTrials | None,
) -> DocumentWriter:
    """Build the writer, and subscribe what a changed document concerns."""
    if trials is not None:
        removals.subscribe(trials.text_removed)
    written = []
    if precomputer is not None:
        removals.subscribe(precomputer.text_removed)
        written.append(precomputer.document_written)
    return DocumentWriter(clients.retriever, removals, deletes, written)
