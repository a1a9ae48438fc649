"""Runs the retriever: ``python -m ragcache_retriever``, with settings from RAGCACHE_* variables."""

from __future__ import annotations

import asyncio
import logging
import platform
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.backends import make_indexes, open_store
from ragcache_retriever.concurrency.background import attempted
from ragcache_retriever.concurrency.cpu import usable_cores
from ragcache_retriever.concurrency.query_gate import QueryGate
from ragcache_retriever.damaged_service import damaged_service
from ragcache_retriever.documents.collection import (
    CollectionDefaults,
    checked_chunking,
    checked_window,
)
from ragcache_retriever.documents.tokenizer import load_serving_tokenizer
from ragcache_retriever.embedding.computation import Computation
from ragcache_retriever.embedding.embedder import Embedder
from ragcache_retriever.embedding.endpoint import EmbeddingEndpoint
from ragcache_retriever.embedding.local_model import LocalModel, MiniLM
from ragcache_retriever.embedding.model_files import download
from ragcache_retriever.interceptors import LimitInterceptor, MetricsInterceptor
from ragcache_retriever.knowledge_base.coordinator import KnowledgeBase
from ragcache_retriever.metrics import PART, Metrics
from ragcache_retriever.preparer import DocumentPreparer
from ragcache_retriever.ranking.hybrid import HybridRanking
from ragcache_retriever.ranking.rerankers import CrossEncoderReranker, RerankEndpoint, Reranker
from ragcache_retriever.readiness import load_and_report
from ragcache_retriever.search.faiss_index import BuildThread, IndexOptions
from ragcache_retriever.service import SERVICE_NAME, ModelNames, RetrieverService
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.sqlite.database import SqliteDatabase
from ragcache_retriever.store.sqlite.files.backup import SqliteBackups
from ragcache_retriever.store.sqlite.files.damage import (
    DocumentsDamaged,
    find_damage,
    until_removed,
)
from ragcache_wire.http_server import HealthServer
from ragcache_wire.process import end_on_stop, keep_collections_short
from ragcache_wire.server import CallInterceptor, GrpcServer, until_stopped
from ragcache_wire.settings import RetrieverSettings
from ragcache_wire.settings.retriever import MAX_DEFAULT_THREADS
from ragcache_wire.settings.table import variable
from ragcache_wire.telemetry.log_format import start_logging
from ragcache_wire.telemetry.metric_registry import export_metrics
from ragcache_wire.tracing import Tracer, tracer
from ragcache_wire.v1 import retriever_pb2_grpc

log = logging.getLogger("ragcache_retriever")

EXIT_MISCONFIGURED = 2
CHECK_DELAY_S = 60.0
"""Time after the start when the check for damage begins, which reads all documents."""
SWITCH_INTERVAL_S = 0.001
"""Time after which a thread passes Python's lock on. A query needs it many times while documents
are embedded, so Python's default of 5 ms would add up."""


def main() -> int:
    """Run the service and return its exit status."""
    end_on_stop()
    try:
        settings = RetrieverSettings()
        start_logging(settings.log_level, settings.log_format, PART)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        keep_collections_short()
        asyncio.run(serve(settings))
    except InvalidInput as error:
        print(f"ragcache_retriever: {error}", file=sys.stderr)
        return EXIT_MISCONFIGURED
    return 0


async def serve(settings: RetrieverSettings) -> None:
    """Serve until a signal stops the process. Raises InvalidInput for unusable settings."""
    instance = platform.node()
    spans = tracer(settings.otlp_endpoint, PART, instance, exports_content=settings.trace_content)
    metrics = Metrics()
    exported = export_metrics(settings.otlp_endpoint, PART, instance, metrics.collectors)
    try:
        async with HealthServer(settings.health_listen, metrics.collectors) as health:
            await _serve(settings, health, spans, metrics)
    finally:
        await asyncio.to_thread(spans.close)
        await asyncio.to_thread(exported.close)


async def _serve(
    settings: RetrieverSettings, health: HealthServer, spans: Tracer, metrics: Metrics
) -> None:
    health.set_progress("opening the documents")
    backups = SqliteBackups(settings.data_dir)
    try:
        store = await asyncio.to_thread(open_store, settings)
    except DocumentsDamaged as error:
        await _serve_damaged(settings, health, backups, error)
        return
    builds = BuildThread()
    knowledge_base = await _make_knowledge_base(settings, health, store, builds)
    restart = asyncio.Event()
    service = RetrieverService(
        knowledge_base,
        spans,
        # Other backends have tools of their own.
        backups=None if store.database.is_shared else backups,
        restart=restart.set,
        models=model_names(settings),
    )
    limits = LimitInterceptor(settings.max_searches, settings.max_upsert_bytes)
    interceptors = (MetricsInterceptor(metrics), limits)
    server = _make_server(settings, service, health, interceptors)
    await server.start()
    log.info("listening on port %d", server.port)
    stopping = asyncio.create_task(_until_stopped_or(restart))
    running = asyncio.create_task(
        load_and_report(settings, knowledge_base, metrics, server, health)
    )
    stop_check = threading.Event()
    checking = asyncio.create_task(_check(store, stop_check, restart))
    try:
        await asyncio.wait((stopping, running), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        log.info("stopping")
        stop_check.set()
        checking.cancel()
        stopping.cancel()
        running.cancel()
        await asyncio.gather(running, stopping, return_exceptions=True)
        await server.stop()
        await asyncio.gather(checking, return_exceptions=True)
        await knowledge_base.close()
        await asyncio.to_thread(builds.shutdown)


async def _until_stopped_or(restart: asyncio.Event) -> None:
    """Wait for a signal, or for a reason to end. The supervisor then starts another process."""
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(until_stopped()), group.create_task(restart.wait())]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()


async def _check(store: DocumentStore, stop: threading.Event, restart: asyncio.Event) -> None:
    """Check the file of documents for damage. A restart then moves it aside."""
    if not isinstance(store.database, SqliteDatabase):
        return
    database = store.database

    async def check() -> None:
        problem = await asyncio.to_thread(find_damage, database.path, stop)
        if problem is not None:
            database.mark_damaged(problem)
            restart.set()

    is_checked = False
    while not is_checked:
        await asyncio.sleep(CHECK_DELAY_S)
        is_checked = await attempted(log, "documents: not checked for damage", check())


async def _serve_damaged(
    settings: RetrieverSettings,
    health: HealthServer,
    backups: SqliteBackups,
    error: DocumentsDamaged,
) -> None:
    """Wait for a backup to restore, or until the damaged file is removed."""
    log.error("%s", error)
    health.set_progress(str(error))
    decided = asyncio.Event()
    service = damaged_service(error, backups, decided.set)
    server = _make_server(settings, service, health)
    await server.start()
    log.info("listening on port %d", server.port)
    watching = asyncio.create_task(until_removed(settings.data_dir, decided))
    try:
        await _until_stopped_or(decided)
    finally:
        watching.cancel()
        await server.stop()


async def _make_knowledge_base(
    settings: RetrieverSettings,
    health: HealthServer,
    store: DocumentStore,
    builds: BuildThread,
) -> KnowledgeBase:
    defaults = collection_defaults(settings)
    health.set_progress("loading the model's tokenizer")
    # In a thread, because the tokenizer may come from the hub first.
    tokenizer = await asyncio.to_thread(load_serving_tokenizer, settings.model)
    health.set_progress("loading the reranker")
    reranker = await asyncio.to_thread(make_reranker, settings)
    gate = QueryGate()
    return KnowledgeBase(
        store,
        make_indexes(settings, store, index_options(settings), builds),
        HybridRanking(reranker),
        DocumentPreparer(make_embedder(settings, gate), tokenizer, gate=gate),
        defaults,
    )


def _make_server(
    settings: RetrieverSettings,
    service: retriever_pb2_grpc.RetrieverServicer,
    health: HealthServer,
    interceptors: Sequence[CallInterceptor] = (),
) -> GrpcServer:
    listen = settings.listen
    try:
        return GrpcServer(
            listen,
            [SERVICE_NAME],
            lambda server: retriever_pb2_grpc.add_RetrieverServicer_to_server(service, server),
            health,
            interceptors,
            settings.credentials,
        )
    except RuntimeError as error:
        raise InvalidInput(
            "RAGCACHE_LISTEN", f"{listen} cannot be used: {error}", "name a free port"
        ) from error


def make_reranker(settings: RetrieverSettings) -> Reranker | None:
    """Return the reranker of the settings, or None. A cross-encoder takes seconds to load."""
    match settings.reranker:
        case "none":
            return None
        case "cross-encoder":
            return CrossEncoderReranker(settings.reranker_model or "", settings.device)
        case url:
            return RerankEndpoint(url, settings.reranker_model or "", settings.reranker_api_key)


def make_embedder(settings: RetrieverSettings, gate: QueryGate) -> Embedder:
    """Return the embedder of the settings."""
    num_threads = settings.embedder_threads or min(usable_cores(), MAX_DEFAULT_THREADS)
    kind, _, name = settings.embedder.partition(":")
    computation = Computation(settings.device)
    match kind:
        case "bundled":
            return MiniLM(gate, num_threads, computation)
        case "path":
            return LocalModel(lambda: Path(name), gate, num_threads, computation)
        case "hf":
            return LocalModel(lambda: download(name), gate, num_threads, computation)
    assert settings.embedder_model is not None, "settings check it"
    return EmbeddingEndpoint(settings.embedder, settings.embedder_model, settings.embedder_api_key)


def model_names(settings: RetrieverSettings) -> ModelNames:
    """Return the names of the models, without addresses of endpoints."""
    embedder, reranker = settings.embedder, settings.reranker
    if not settings.embeds_itself:
        embedder = settings.embedder_model or ""
    if reranker != "none":
        reranker = settings.reranker_model or ""
    return ModelNames(embedder, reranker)


def index_options(settings: RetrieverSettings) -> IndexOptions:
    """Return how the vectors of all collections are searched."""
    return IndexOptions(precision=settings.index_precision, recall=settings.index_recall)


def collection_defaults(settings: RetrieverSettings) -> CollectionDefaults:
    """Return the defaults of collections. Raises InvalidInput for values out of range."""
    return CollectionDefaults(
        chunking=checked_chunking(
            variable("chunk_tokens"),
            variable("chunk_overlap_tokens"),
            settings.chunk_tokens,
            settings.chunk_overlap_tokens,
        ),
        window=checked_window(variable("window_chunks"), settings.window_chunks),
        index=IndexKind(settings.index_kind),
    )


if __name__ == "__main__":
    sys.exit(main())
