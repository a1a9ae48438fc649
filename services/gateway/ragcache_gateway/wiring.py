"""Builds the gateway's services and connects them to each other."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from ragcache_core.cluster.engine_queue import EngineQueue
from ragcache_core.identity.keys import token_digest
from ragcache_gateway.admission.slo import SloAdmission
from ragcache_gateway.admission.tenant_queue import TenantQueue
from ragcache_gateway.admission.usage_counter import UsageCounter
from ragcache_gateway.auth.api_keys import ApiKeys, tenant_shares
from ragcache_gateway.auth.tenant_domains import TenantDomains
from ragcache_gateway.background.idle import IdleEngines, IdleWindows
from ragcache_gateway.background.precompute import Precomputer
from ragcache_gateway.background.quality_gate import GateTarget, QualityGate
from ragcache_gateway.background.quality_trials import QualityTrials
from ragcache_gateway.documents.delete_sender import DeleteSender, DigestSpaces
from ragcache_gateway.documents.erasure import ErasureCheck
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
from ragcache_gateway.prompts.builder import PromptThread, TemplateFrame
from ragcache_gateway.prompts.conversation import Conversation
from ragcache_gateway.prompts.model_runtime import ModelRuntime
from ragcache_gateway.prompts.reuse_mode import ReuseMode, ServedModel
from ragcache_gateway.speculation.prefetch import StorePrefetcher
from ragcache_gateway.speculation.speculator import Speculator
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_kv.store_client.async_sharded import AsyncShardedStore
from ragcache_wire.clients.engine_client import HealthClient
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.sandbox import sandbox_support
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
    """What every service is built with.

    Args:
        models: The served models. The first one is of requests that name none.
    """

    settings: GatewaySettings
    limits: Limits
    models: Sequence[ModelRuntime]
    metrics: Metrics
    tracer: Tracer
    usage: UsageCounter


@dataclass(frozen=True, slots=True)
class _Common:
    """What the services of all models share."""

    retriever: RetrieverClient
    store: AsyncShardedStore
    removals: RemovalFeed
    view: CacheView
    recent_answers: RecentAnswers
    tenant_queue: TenantQueue


@dataclass(frozen=True, slots=True)
class _Model:
    """A model, what its requests begin with, and its engines."""

    runtime: ModelRuntime
    template: TemplateFrame
    engines: EnginePool

    @property
    def served(self) -> ServedModel:
        return self.runtime.served


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
    settings, metrics = shared.settings, shared.metrics
    async with _Services() as services:
        retriever = services.closing(RetrieverClient(settings.retriever, settings.credentials))
        health = services.closing(
            HealthClient("retriever", settings.retriever, settings.credentials)
        )
        store = services.closing(AsyncShardedStore(settings.cachestore, settings.credentials))
        shares = tenant_shares(keys)
        tenant_queue = TenantQueue(lambda: shares().weights)
        services.closing(shared.usage).start(retriever, tenant_queue)
        removals = RemovalFeed(retriever)
        domains = TenantDomains(keys, retriever, settings.tenant_grace_s)
        if keys is not None:
            metrics.keys_stale.set_function(lambda: float(keys.is_stale()))
        deletes = services.started(
            DeleteSender(DigestSpaces.of(shared.models), domains.current, retriever, store, metrics)
        )
        services.closing(domains).start(deletes)
        models = [await _start_engines(services, shared, runtime) for runtime in shared.models]
        view = services.started(
            CacheView(
                lambda: {one.address: one.records for each in models for one in each.engines.known},
                store.addresses,
                settings,
                metrics,
                partial(_queue_at, models),
            )
        )
        common = _Common(retriever, store, removals, view, RecentAnswers(), tenant_queue)
        chat, *others = [await _start_chat(services, shared, common, one) for one in models]
        extractor = services.closing(TextExtractor())
        support = sandbox_support()
        support.warn("readers of documents")
        metrics.set_reader_protections(support)
        # Before the feed starts, so that its subscribers miss no removal.
        documents = _document_writer(common, deletes, [chat, *others])
        await removals.start()
        services.closing(removals)
        pools = {one.served.name: one.engines for one in models}
        yield GatewayServices(
            settings=settings,
            metrics=metrics,
            chat=chat,
            others=tuple(others),
            documents=documents,
            erasure=ErasureCheck(deletes, store, view.engine_remains, retriever),
            extractor=extractor,
            retriever=retriever,
            store=store,
            component_watch=services.started(
                ComponentWatch(pools, health, settings.engine_watch_s)
            ),
            cache_view=view,
            tree_reader=TreeReader(view.tree, common.recent_answers, chat.planner.now),
        )


async def _start_engines(services: _Services, shared: Shared, runtime: ModelRuntime) -> _Model:
    template = runtime.prompts.frame(Conversation.asking(None, "?"))
    probe = probe_body(runtime.served.name, template)
    own = [engine for engine in shared.settings.engines if engine.model == runtime.number]
    settings = shared.settings.replace(engines=tuple(own))
    engines = EnginePool(settings, shared.limits, probe, shared.metrics, shared.tracer)
    await services.closing(engines).start()
    return _Model(runtime, template, engines)


def _queue_at(models: Sequence[_Model], address: str) -> EngineQueue | None:
    """Return the queue of the engine at an address; None if it has left."""
    known = (engine for model in models for engine in model.engines.known)
    return next((engine.queue for engine in known if engine.address == address), None)


async def _start_chat(
    services: _Services, shared: Shared, common: _Common, model: _Model
) -> ChatServices:
    """Start what the questions to one model work with."""
    settings, tracer = shared.settings, shared.tracer
    served, engines = model.served, model.engines
    metrics = shared.metrics.of_model(served.name)
    prompts = PromptThread(model.runtime.prompts)
    services.callback(prompts.close)
    loads = services.closing(EngineLoads(engines))
    await loads.start()
    windows = IdleWindows(engines, metrics)
    idle = IdleEngines(served, engines, windows, common.removals, metrics)
    background = _start_background(services, settings, common, model, idle, prompts)
    planner = RequestPlanner(settings, served.space, loads, common.view, tracer=tracer)
    speculator = None
    if settings.speculation != "off":
        speculator = Speculator(engines, loads, planner, metrics, tracer)
    return ChatServices(
        model=served,
        default_reuse=ReuseMode(settings.reuse, settings.max_recompute_share),
        default_rewrite=settings.rewrite,
        prompts=prompts,
        retriever=common.retriever,
        engines=engines,
        idle=windows,
        gate=background.gate,
        trials=background.trials,
        precomputer=background.precomputer,
        speculator=speculator,
        prefetcher=StorePrefetcher(planner, common.store, served.space, metrics, tracer),
        recent_answers=common.recent_answers,
        planner=planner,
        chunk_keys=ChunkKeys(served),
        loads=loads,
        tenant_queue=common.tenant_queue,
        reordering_window_ms=settings.reordering_window_ms,
        slo=SloAdmission(settings, loads, metrics),
        metrics=metrics,
        tracer=tracer,
    )


def _start_background(
    services: _Services,
    settings: GatewaySettings,
    common: _Common,
    model: _Model,
    idle: IdleEngines,
    prompts: PromptThread,
) -> _Background:
    retriever, template = common.retriever, model.template
    share = settings.max_recompute_share
    precomputer, trials = None, None
    if settings.precompute:
        precomputer = services.started(
            Precomputer(idle, template, settings.reuse, prompts, common.store, retriever)
        )
    if settings.quality is not None:
        trials = services.started(QualityTrials(idle, settings.quality, share))
    gate = services.started(
        QualityGate(
            model.served,
            token_digest(template.head).hex(),
            target=GateTarget(settings.quality, share, settings.precision.lossy),
            retriever=retriever,
            trials=trials,
        )
    )
    return _Background(precomputer, trials, gate)


def _document_writer(
    common: _Common, deletes: DeleteSender, chats: Sequence[ChatServices]
) -> DocumentWriter:
    """Build the writer, and subscribe what a changed document concerns."""
    removals, written = common.removals, []
    for chat in chats:
        if chat.trials is not None:
            removals.subscribe(chat.trials.text_removed)
        if chat.precomputer is not None:
            removals.subscribe(chat.precomputer.text_removed)
            written.append(chat.precomputer.document_written)
    return DocumentWriter(common.retriever, removals, deletes, written)
