"""What runs beside the gRPC server: loading, and the readiness and metrics that are reported.

The storage is ready if documents can be read and writes become durable. A disk can stop to answer
without an error, and a thread that waits for it cannot be interrupted. So each check runs in a
thread of its own, and no other check begins while one hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_retriever.concurrency.background import attempted
from ragcache_retriever.knowledge_base.coordinator import KnowledgeBase
from ragcache_retriever.metrics import Metrics
from ragcache_wire.http_server import HealthServer
from ragcache_wire.server import GrpcServer
from ragcache_wire.settings import RetrieverSettings

log = logging.getLogger(__name__)

PROBE_FILE = "readiness-probe"
DEADLINE_S = 2.0
PERIOD_S = 2.0
Check = Callable[[], Awaitable[str | None]]
"""Returns what is wrong, or None."""
FAILURE_PAUSE_S = 10.0
"""Time until the next try after an unexpected error."""


class StorageProbe:
    """Reads documents, then writes and synchronizes a small file.

    Args:
        folder: Folder of the documents. None checks only the reading.
        read: Reads a few documents. It raises any error if it cannot.
    """

    def __init__(
        self, folder: Path | None, read: Callable[[], object], deadline_s: float = DEADLINE_S
    ) -> None:
        self._folder = folder
        self._read = read
        self._deadline_s = deadline_s
        self._running: asyncio.Future[str | None] | None = None
        self._began_s = 0.0

    async def check(self) -> str | None:
        """Return what is wrong, or None. It takes at most the deadline."""
        loop = asyncio.get_running_loop()
        if self._running is None or self._running.done():
            self._running = loop.create_future()
            self._began_s = time.monotonic()
            threading.Thread(
                target=self._run, args=(loop, self._running), name="storage-probe", daemon=True
            ).start()
        done, _ = await asyncio.wait((self._running,), timeout=self._deadline_s)
        if done:
            return self._running.result()
        waited_s = time.monotonic() - self._began_s
        return f"the storage has not answered for {waited_s:.0f} s"

    def _run(self, loop: asyncio.AbstractEventLoop, running: asyncio.Future[str | None]) -> None:
        problem: str | None = None
        try:
            self._read()
            if self._folder is not None:
                self._write(self._folder)
        except Exception as error:  # of the file system, of SQLite or of a network backend
            problem = f"the storage failed: {error}"

        def finish() -> None:
            if not running.done():
                running.set_result(problem)

        # The loop is closed if the service stopped meanwhile.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(finish)

    def _write(self, folder: Path) -> None:
        file = os.open(folder / PROBE_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(file, b"probe")
            os.fsync(file)
        finally:
            os.close(file)


class ReadinessMonitor:
    """Reports ready while a check passes, and its problem otherwise. It recovers by itself.

    Args:
        set_ready: Reports ready.
        set_not_ready: Reports a problem.
    """

    def __init__(
        self,
        check: Check,
        set_ready: Callable[[], Awaitable[None]],
        set_not_ready: Callable[[str], Awaitable[None]],
        period_s: float = PERIOD_S,
    ) -> None:
        self._check = check
        self._set_ready = set_ready
        self._set_not_ready = set_not_ready
        self._period_s = period_s
        self._is_ready: bool | None = None

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await attempted(log, "readiness: not reported", self.update())
            await asyncio.sleep(self._period_s)

    async def update(self) -> None:
        """Check once and report the result."""
        problem = await self._problem()
        if problem is None:
            if self._is_ready is not True:
                log.info("readiness: ready")
                await self._set_ready()
        else:
            if self._is_ready is not False:
                log.warning("readiness: not ready problem=%s", problem)
            await self._set_not_ready(problem)
        self._is_ready = problem is None

    async def _problem(self) -> str | None:
        try:
            return await self._check()
        except Exception as error:
            log.exception("readiness: the check failed")
            return f"the check failed: {error!r}"


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
    probe = StorageProbe(folder, functools.partial(knowledge_base.store.reads.report, "readiness"))
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
