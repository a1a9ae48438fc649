"""Builds the gateway's services and connects them to each other."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from ragcache_core.identity.keys import KVSpace, token_digest
from ragcache_gateway.auth.api_keys import ApiKeys
from ragcache_gateway.auth.tenant_domains import TenantDomains
from ragcache_gateway.background.idle import IdleWindows
from ragcache_gateway.background.precompute import Precomputer
from ragcache_gateway.background.quality_gate import QualityGate
from ragcache_gateway.background.quality_trials import QualityTrials
from ragcache_gateway.documents.delete_sender import DeleteSender
from ragcache_gateway.documents.removal_feed import RemovalFeed
from ragcache_gateway.documents.writer import DocumentWriter
from ragcache_gateway.engines.completion import probe_body
from ragcache_gateway.engines.engine_load import EngineLoads
from ragcache_gateway.engines.pool import EnginePool
from ragcache_gateway.explain.recent_answers import RecentAnswers
from ragcache_gateway.explain.tree_outline import TreeReader
from ragcache_gateway.extraction.extractor import TextExtractor
from ragcache_gateway.http.parts_watch import PartsWatch
from ragcache_gateway.http.services import GatewayServices
from ragcache_gateway.pipeline.chat_services import ChatServices
from ragcache_gateway.planning.cache_view import CacheView
from ragcache_gateway.planning.chunk_keys import ChunkKeys
from ragcache_gateway.planning.request_planner import RequestPlanner
from ragcache_gateway.prompts.builder import PromptBuilder, TemplateFrame
from ragcache_gateway.prompts.conversation import Conversation
from ragcache_gateway.prompts.reuse_mode import ReuseMode
from ragcache_gateway.prompts.served_model import ServedModel
from ragcache_gateway.speculation.prefetch import StorePrefetcher
from ragcache_gateway.speculation.speculator import Speculator
from ragcache_gateway.status.metrics import Metrics
from ragcache_kv.store_client.async_sharded import AsyncShardedStore
from ragcache_wire.clients.engine_client import HealthClient
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.tracing import Tracer
from ragcache_wire.watched.limits import Limits


@dataclass(frozen=True, slots=True)
class _Tools:
    """What every service is built with. The stack closes the services at the end."""

    settings: GatewaySettings
    limits: Limits
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
    keys: ApiKeys | None,
    limits: Limits,
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
        tools = _Tools(settings, limits, model, prompts, tokenizing, metrics, tracer, stack)
        removals = RemovalFeed(clients.retriever)
        deletes = _start_deletes(tools, clients, keys)
        template = prompts.frame(Conversation.asking(None, "?"))
        engines = await _start_engines(tools, template)
        view = _start_cache_view(tools, engines, clients)
        loads = EngineLoads(engines)
        stack.push_async_callback(loads.close)
        await loads.start()
        idle = IdleWindows(engines, metrics)
        precomputer = _start_precomputer(tools, template, engines, idle, clients, removals)
        trials = _start_trials(tools, engines, idle, removals)
        gate = _start_gate(tools, template, clients, trials)
        writer = _document_writer(clients, removals, deletes, precomputer, trials)
        planner = RequestPlanner(settings, space, engines, loads, view, tracer=tracer)
        recent_answers = RecentAnswers()
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
                default_rewrite=settings.rewrite,
                prompts=prompts,
                tokenizing=tokenizing,
                retriever=clients.retriever,
                engines=engines,
                idle=idle,
                gate=gate,
                trials=trials,
                precomputer=precomputer,
                speculator=_speculator(tools, engines, loads, planner),
                prefetcher=StorePrefetcher(planner, clients.store, space, metrics, tracer),
                recent_answers=recent_answers,
                planner=planner,
                chunk_keys=ChunkKeys(model),
                loads=loads,
                metrics=metrics,
                tracer=tracer,
            ),
            documents=writer,
            extractor=extractor,
            retriever=clients.retriever,
            store=clients.store,
            parts_watch=_start_parts_watch(tools, engines, clients),
            cache_view=view,
            tree_reader=TreeReader(view.tree, recent_answers, planner.now),
        )


def _connect_clients(settings: GatewaySettings, stack: AsyncExitStack) -> _Clients:
    retriever = RetrieverClient(settings.retriever)
    stack.push_async_callback(retriever.close)
    health = HealthClient("retriever", settings.retriever)
    stack.push_async_callback(health.close)
    store = AsyncShardedStore(settings.cachestore)
    stack.push_async_callback(store.close)
    return _Clients(retriever, health, store)


def _start_deletes(tools: _Tools, clients: _Clients, keys: ApiKeys | None) -> DeleteSender:
    domains = TenantDomains(keys, clients.retriever)
    deletes = DeleteSender(
        tools.model,
        domains=domains.current,
        retriever=clients.retriever,
        store=clients.store,
        metrics=tools.metrics,
    )
    deletes.start()
    tools.stack.push_async_callback(deletes.close)
    domains.start(deletes)
    tools.stack.push_async_callback(domains.close)
    return deletes


async def _start_engines(tools: _Tools, template: TemplateFrame) -> EnginePool:
    # Most prompts begin with the template's head, so the probe caches it in the engine.
    probe = probe_body(tools.model.name, template.head or [0])
    engines = EnginePool(tools.settings, tools.limits, probe, tools.metrics, tools.tracer)
    tools.stack.push_async_callback(engines.close)
    await engines.start()
    return engines


def _start_parts_watch(tools: _Tools, engines: EnginePool, clients: _Clients) -> PartsWatch:
    watch = PartsWatch(engines, clients.retriever_health, tools.settings.engine_watch_s)
    watch.start()
    tools.stack.push_async_callback(watch.close)
    return watch


def _start_cache_view(tools: _Tools, engines: EnginePool, clients: _Clients) -> CacheView:
    view = CacheView(
        lambda: {engine.address: engine.records for engine in engines.known},
        clients.store.addresses,
        tools.settings.signing_key_file,
        max_nodes=tools.settings.view_max_nodes,
        predicted_tokens=tools.settings.engine_cache_tokens,
        poll_s=tools.settings.engine_watch_s,
        metrics=tools.metrics,
    )
    view.start()
    tools.stack.push_async_callback(view.close)
    return view


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


def _speculator(
    tools: _Tools,
    engines: EnginePool,
    loads: EngineLoads,
    planner: RequestPlanner,
) -> Speculator | None:
    if tools.settings.speculation == "off":
        return None
    return Speculator(engines, loads, planner, tools.metrics, tools.tracer)


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
