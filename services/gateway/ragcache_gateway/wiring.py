"""Builds the gateway's services and connects them to each other."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ragcache_core.identity.keys import token_digest
from ragcache_gateway.auth.api_keys import ApiKeys
from ragcache_gateway.auth.tenant_domains import TenantDomains
from ragcache_gateway.background.idle import IdleEngines, IdleWindows
from ragcache_gateway.background.precompute import Precomputer
from ragcache_gateway.background.quality_gate import QualityGate
from ragcache_gateway.background.quality_trials import QualityTrials
from ragcache_gateway.documents.delete_sender import DeleteSender
from ragcache_gateway.documents.removal_feed import RemovalFeed
from ragcache_gateway.documents.writer import DocumentWriter
from ragcache_gateway.engines.completion import probe_body
from ragcache_gateway.engines.engine_load import EngineLoads
from ragcache_gateway.engines.pool import EnginePool
from ragcache_gateway.explain.explanation import RecentAnswers
from ragcache_gateway.explain.tree_outline import TreeReader
from ragcache_gateway.extraction.extractor import TextExtractor
from ragcache_gateway.http.component_watch import ComponentWatch
from ragcache_gateway.http.services import GatewayServices
from ragcache_gateway.pipeline.chat_services import ChatServices
from ragcache_gateway.planning.cache_view import CacheView
from ragcache_gateway.planning.chunk_keys import ChunkKeys
from ragcache_gateway.planning.request_planner import RequestPlanner
from ragcache_gateway.prompts.builder import PromptBuilder, PromptThread, TemplateFrame
from ragcache_gateway.prompts.conversation import Conversation
from ragcache_gateway.prompts.reuse_mode import ReuseMode, ServedModel
from ragcache_gateway.speculation.prefetch import StorePrefetcher
from ragcache_gateway.speculation.speculator import Speculator
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_kv.store_client.async_sharded import AsyncShardedStore
from ragcache_wire.clients.engine_client import HealthClient
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.tracing import Tracer
from ragcache_wire.watched.limits import Limits


class _Closable(Protocol):
    async def close(self) -> None: ...


class _Startable(_Closable, Protocol):
    def start(self) -> None: ...


_C = TypeVar("_C", bound=_Closable)
_S = TypeVar("_S", bound=_Startable)


class _Services(AsyncExitStack):
    """Closes the services at the end, the last one first."""

    def closing(self, service: _C) -> _C:
        """Close a service at the end."""
        self.push_async_callback(service.close)
        return service

    def started(self, service: _S) -> _S:
        """Start a service, and close it at the end."""
        service.start()
        return self.closing(service)


@dataclass(frozen=True, slots=True)
class Shared:
    """What every service is built with."""

    settings: GatewaySettings
    limits: Limits
    model: ServedModel
    prompts: PromptBuilder
    metrics: Metrics
    tracer: Tracer


@dataclass(frozen=True, slots=True)
class _Clients:
    """Connections to the other components, apart from the engines."""

    retriever: RetrieverClient
    retriever_health: HealthClient
    store: AsyncShardedStore


@dataclass(frozen=True, slots=True)
class _Background:
    """What engines work on in idle windows, and what decides about blends."""

    precomputer: Precomputer | None
    trials: QualityTrials | None
    gate: QualityGate


@asynccontextmanager
async def connect_services(
    shared: Shared, keys: ApiKeys | None
) -> AsyncGenerator[GatewayServices, None]:
    """Build and start every service; stop them at the end."""
    settings, model, metrics = shared.settings, shared.model, shared.metrics
    async with _Services() as services:
        clients = _Clients(
            services.closing(RetrieverClient(settings.retriever)),
            services.closing(HealthClient("retriever", settings.retriever)),
            services.closing(AsyncShardedStore(settings.cachestore)),
        )
        retriever, store = clients.retriever, clients.store
        prompts = PromptThread(shared.prompts)
        services.callback(prompts.close)
        removals = RemovalFeed(retriever)
        domains = TenantDomains(keys, retriever)
        deletes = services.started(DeleteSender(model, domains.current, retriever, store, metrics))
        services.closing(domains).start(deletes)
        template = shared.prompts.frame(Conversation.asking(None, "?"))
        engines = await _start_engines(services, shared, template)
        view = services.started(
            CacheView(
                lambda: {engine.address: engine.records for engine in engines.known},
                store.addresses,
                settings,
                metrics,
            )
        )
        loads = services.closing(EngineLoads(engines))
        await loads.start()
        windows = IdleWindows(engines, metrics)
        idle = IdleEngines(model, engines, windows, removals, metrics)
        background = _start_background(services, shared, clients, template, idle, prompts)
        planner = RequestPlanner(settings, model.space, loads, view, tracer=shared.tracer)
        speculator = None
        if settings.speculation != "off":
            speculator = Speculator(engines, loads, planner, metrics, shared.tracer)
        recent_answers = RecentAnswers()
        extractor = services.closing(TextExtractor())
        # Before the feed starts, so that its subscribers miss no removal.
        documents = _document_writer(retriever, removals, deletes, background)
        await removals.start()
        services.closing(removals)
        yield GatewayServices(
            settings=settings,
            metrics=metrics,
            chat=ChatServices(
                model=model,
                default_reuse=ReuseMode(settings.reuse, settings.max_recompute_share),
                default_rewrite=settings.rewrite,
                prompts=prompts,
                retriever=retriever,
                engines=engines,
                idle=windows,
                gate=background.gate,
                trials=background.trials,
                precomputer=background.precomputer,
                speculator=speculator,
                prefetcher=StorePrefetcher(planner, store, model.space, metrics, shared.tracer),
                recent_answers=recent_answers,
                planner=planner,
                chunk_keys=ChunkKeys(model),
                loads=loads,
                metrics=metrics,
                tracer=shared.tracer,
            ),
            documents=documents,
            extractor=extractor,
            retriever=retriever,
            store=store,
            component_watch=services.started(
                ComponentWatch(engines, clients.retriever_health, settings.engine_watch_s)
            ),
            cache_view=view,
            tree_reader=TreeReader(view.tree, recent_answers, planner.now),
        )


async def _start_engines(
    services: _Services, shared: Shared, template: TemplateFrame
) -> EnginePool:
    # Most prompts begin with the template's head, so the probe caches it in the engine.
    probe = probe_body(shared.model.name, template.head or [0])
    engines = services.closing(
        EnginePool(shared.settings, shared.limits, probe, shared.metrics, shared.tracer)
    )
    await engines.start()
    return engines


def _start_background(
    services: _Services,
    shared: Shared,
    clients: _Clients,
    template: TemplateFrame,
    idle: IdleEngines,
    prompts: PromptThread,
) -> _Background:
    settings, retriever = shared.settings, clients.retriever
    share = settings.max_recompute_share
    precomputer, trials = None, None
    if settings.precompute:
        precomputer = services.started(
            Precomputer(idle, template, settings.reuse, prompts, clients.store, retriever)
        )
    if settings.quality is not None:
        trials = services.started(QualityTrials(idle, settings.quality, share))
    gate = services.started(
        QualityGate(
            shared.model,
            token_digest(template.head).hex(),
            wanted_quality=settings.quality,
            max_recompute_share=share,
            retriever=retriever,
            trials=trials,
        )
    )
    return _Background(precomputer, trials, gate)


def _document_writer(
    retriever: RetrieverClient,
    removals: RemovalFeed,
    deletes: DeleteSender,
    background: _Background,
) -> DocumentWriter:
    """Build the writer, and subscribe what a changed document concerns."""
    if background.trials is not None:
        removals.subscribe(background.trials.text_removed)
    written = []
    if background.precomputer is not None:
        removals.subscribe(background.precomputer.text_removed)
        written.append(background.precomputer.document_written)
    return DocumentWriter(retriever, removals, deletes, written)
