"""What runs beside the gRPC server: loading, the replica, and the readiness that is reported."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import Any

from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_retriever.concurrency.request_limits import RequestLimits
from ragcache_retriever.knowledge_base.coordinator import KnowledgeBase
from ragcache_retriever.limited_service import LimitedService
from ragcache_retriever.measured_service import MeasuredService
from ragcache_retriever.metrics import Metrics
from ragcache_retriever.readiness.monitor import Check, ReadinessMonitor
from ragcache_retriever.readiness.storage_probe import StorageProbe
from ragcache_retriever.replication.replicated_service import ReplicatedService
from ragcache_retriever.replication.wiring import make_replica
from ragcache_wire.health_server import HealthServer
from ragcache_wire.server import GrpcServer
from ragcache_wire.settings import RetrieverSettings

log = logging.getLogger(__name__)

FAILURE_PAUSE_S = 10.0
"""Time until the next try after an unexpected error."""


class ServedParts:
    """Loads the knowledge base, then takes part in replication and watches the storage.

    Args:
        restart: Ends the process. Its supervisor starts it again.
    """

    def __init__(
        self,
        settings: RetrieverSettings,
        knowledge_base: KnowledgeBase,
        metrics: Metrics,
        restart: Callable[[], None],
    ) -> None:
        self._metrics = metrics
        self._settings = settings
        self._knowledge_base = knowledge_base
        # PostgreSQL makes writes durable itself.
        folder = None if settings.backend == "postgres" else settings.data_dir
        self._probe = StorageProbe(
            folder, functools.partial(knowledge_base.store.report, "readiness")
        )
        self._is_loaded = False
        self._replica = replica = make_replica(settings, knowledge_base, self._is_fit, restart)
        metrics.observe_replica(
            lag_s=lambda: 0.0 if replica is None else replica.lag_s,
            is_writer=lambda: replica is None or replica.is_writer,
            max_lag_s=settings.max_lag_s,
        )

    def wrapped(self, service: Any) -> Any:
        """Return a service with limits and metrics, and with the calls of replicas, if any."""
        settings, replica = self._settings, self._replica
        limits = RequestLimits(settings.max_searches, settings.max_upsert_bytes)
        measured = MeasuredService(LimitedService(service, limits), self._metrics)
        return measured if replica is None else ReplicatedService(measured, replica)

    async def run(self, server: GrpcServer, health: HealthServer) -> None:
        """Work until cancelled."""
        await load(self._knowledge_base, health.set_progress, is_writer=self._replica is None)
        self._is_loaded = True
        log.info("loaded")
        checks: list[Check] = [self._probe.check]
        if self._replica is not None:
            checks.append(self._replica.problem)
        monitor = ReadinessMonitor(checks, server.set_ready, server.set_not_ready)
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(monitor.run(), name="readiness"),
            asyncio.create_task(self._metrics.follow(self._knowledge_base), name="metrics"),
        ]
        if self._replica is not None:
            tasks.append(asyncio.create_task(self._replica.run(), name="replica"))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Close connections. The server has stopped."""
        if self._replica is not None:
            await self._replica.close()

    def _is_fit(self) -> bool:
        return self._is_loaded and self._probe.problem is None


async def load(
    knowledge_base: KnowledgeBase, progress: Callable[[str], None], *, is_writer: bool
) -> None:
    """Load the knowledge base, and retry until the embedder answers and the disk has space.

    Raises:
        RagCacheError: A setting cannot be used.
    """
    while True:
        try:
            return await knowledge_base.load(progress, is_writer=is_writer)
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
