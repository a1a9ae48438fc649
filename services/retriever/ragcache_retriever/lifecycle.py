"""What runs beside the gRPC server: loading, and the readiness and metrics that are reported."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable

from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_retriever.knowledge_base.coordinator import KnowledgeBase
from ragcache_retriever.metrics import Metrics
from ragcache_retriever.readiness.monitor import ReadinessMonitor
from ragcache_retriever.readiness.storage_probe import StorageProbe
from ragcache_wire.http_server import HealthServer
from ragcache_wire.server import GrpcServer
from ragcache_wire.settings import RetrieverSettings

log = logging.getLogger(__name__)

FAILURE_PAUSE_S = 10.0
"""Time until the next try after an unexpected error."""


async def load_and_report(
    settings: RetrieverSettings,
    knowledge_base: KnowledgeBase,
    metrics: Metrics,
    server: GrpcServer,
    health: HealthServer,
) -> None:
    """Load the knowledge base, then report readiness and metrics until cancelled."""
    await load(knowledge_base, health.set_progress)
    log.info("loaded")
    # PostgreSQL makes writes durable itself.
    folder = None if settings.backend == "postgres" else settings.data_dir
    probe = StorageProbe(folder, functools.partial(knowledge_base.store.report, "readiness"))
    monitor = ReadinessMonitor(probe.check, server.set_ready, server.set_not_ready)
    async with asyncio.TaskGroup() as group:
        group.create_task(monitor.run(), name="readiness")
        group.create_task(metrics.follow(knowledge_base), name="metrics")


async def load(knowledge_base: KnowledgeBase, progress: Callable[[str], None]) -> None:
    """Load the knowledge base, and retry until the embedder answers and the disk has space.

    Raises:
        RagCacheError: A setting cannot be used.
    """
    while True:
        try:
            return await knowledge_base.load(progress)
        except Unavailable as error:
            log.warning("knowledge base: not ready error=%s", error)
            progress(str(error))
            await asyncio.sleep(error.retry_after_s)
        except RagCacheError:
            raise
        except Exception as error:
            log.exception("knowledge base: loading failed")
            progress(f"loading failed: {error!r}")
            await asyncio.sleep(FAILURE_PAUSE_S)
