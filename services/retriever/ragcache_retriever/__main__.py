"""Run the retriever: ``python -m ragcache_retriever``, told by RAGCACHE_* variables."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import sys
from collections.abc import Callable

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_retriever.config import Config, EmbedderConfig
from ragcache_retriever.documents.document_store import DocumentStore
from ragcache_retriever.documents.tokenizer import load_token_counter
from ragcache_retriever.embedding.embedder import Embedder
from ragcache_retriever.embedding.endpoint import EmbeddingEndpoint
from ragcache_retriever.embedding.minilm import MiniLM
from ragcache_retriever.knowledge_base import KnowledgeBase
from ragcache_retriever.service import SERVICE_NAME, RetrieverService
from ragcache_wire.health_server import HealthServer
from ragcache_wire.server import GrpcServer, until_stopped
from ragcache_wire.tracing import Tracer, tracer
from ragcache_wire.v1 import retriever_pb2 as pb
from ragcache_wire.v1 import retriever_pb2_grpc

log = logging.getLogger("ragcache_retriever")

EXIT_MISCONFIGURED = 2


def main() -> int:
    """Entry point; returns the exit status."""
    try:
        config = Config.from_environment(os.environ)
        start_logging(config.log_level)
        asyncio.run(serve(config))
    except InvalidInput as error:
        print(f"ragcache_retriever: {error}", file=sys.stderr)
        return EXIT_MISCONFIGURED
    return 0


def start_logging(level: str) -> None:
    """One plain line per event, to stderr."""
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    # A line per request to an endpoint helps only whoever debugs.
    if level != "debug":
        logging.getLogger("httpx").setLevel(logging.WARNING)


async def serve(config: Config) -> None:
    """Serve until told to stop. Raises InvalidInput for what only its operator can mend."""
    spans = tracer(config.otlp_endpoint, "retriever", platform.node())
    try:
        async with HealthServer(config.health_listen) as health:
            await _serve(config, health, spans)
    finally:
        await asyncio.to_thread(spans.close)


async def _serve(config: Config, health: HealthServer, spans: Tracer) -> None:
    knowledge_base = KnowledgeBase(
        DocumentStore(config.data_dir),
        make_embedder(config.embedder),
        load_token_counter(config.model),
        config.defaults,
        markdown=pb.CONTENT_TYPE_MARKDOWN,
    )
    service = RetrieverService(knowledge_base, spans)
    try:
        server = GrpcServer(
            config.listen,
            [SERVICE_NAME],
            lambda server: retriever_pb2_grpc.add_RetrieverServicer_to_server(service, server),
            health,
        )
    except RuntimeError as error:
        raise InvalidInput(
            "RAGCACHE_LISTEN", f"{config.listen} cannot be used: {error}", "name a free port"
        ) from error
    await server.start()
    log.info("listening on port %d", server.port)
    stopping = asyncio.create_task(until_stopped())
    loading = asyncio.create_task(load(knowledge_base, health.set_progress))
    try:
        await asyncio.wait((stopping, loading), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            await server.set_ready()
            log.info("ready")
            await stopping
    finally:
        log.info("stopping")
        loading.cancel()
        stopping.cancel()
        await server.stop()
        await asyncio.gather(loading, stopping, return_exceptions=True)
        await knowledge_base.close()


async def load(knowledge_base: KnowledgeBase, progress: Callable[[str], None]) -> None:
    """Load, however long the embedder takes to answer."""
    while True:
        try:
            return await knowledge_base.load(progress)
        except Unavailable as error:
            log.warning("not ready: %s", error)
            progress(str(error))
            await asyncio.sleep(error.retry_after_s)


def make_embedder(config: EmbedderConfig) -> Embedder:
    """The embedder that was asked for."""
    return EmbeddingEndpoint(config) if config.is_endpoint else MiniLM(config.threads)


if __name__ == "__main__":
    sys.exit(main())
