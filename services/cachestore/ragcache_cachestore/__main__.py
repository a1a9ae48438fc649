"""Run a cache store: ``python -m ragcache_cachestore``, configured by RAGCACHE_* variables."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from dataclasses import dataclass

from ragcache_cachestore.api.data_server import DataServer
from ragcache_cachestore.api.grpc_service import SERVICE, CacheStoreService
from ragcache_cachestore.background.re_encoder import Pace, ReEncoder
from ragcache_cachestore.cluster.catch_up import CatchUp
from ragcache_cachestore.cluster.replicator import Replicator
from ragcache_cachestore.storage.malloc import reuse_freed_memory
from ragcache_cachestore.store import Store
from ragcache_cachestore.telemetry.exporter import ExportingTelemetry, Telemetry
from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_core.tiering.precision_assignment import (
    FixedAssignment,
    HaRagAssignment,
    PrecisionAssignment,
)
from ragcache_core.tiering.score_assignment import MemoryBudget, ScoreAssignment
from ragcache_wire.health_server import HealthServer
from ragcache_wire.server import GrpcServer, until_stopped
from ragcache_wire.settings import CacheStoreSettings
from ragcache_wire.settings.field_types import split_address

log = logging.getLogger("ragcache_cachestore")

SWITCH_INTERVAL_S = 5e-4
"""How long a thread may keep Python's lock while another one waits for it. Most of what is done
here under the lock takes microseconds; Python's own 5 ms would be what a get mostly waits for."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a cache store is made of, beside its gRPC server."""

    store: Store
    transports: DataServer
    rejoin: CatchUp
    replication: Replicator


async def serve(config: CacheStoreSettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises InvalidInput for an address or folder not usable."""
    async with HealthServer(config.health_listen) as health:
        health.set_progress("opening the disk tier")
        with contextlib.ExitStack() as ends:
            # In a thread: with many variants it takes a while, in which health is asked for.
            parts = await asyncio.to_thread(_open, config, ends, health)
            try:
                await _serve(config, parts, health)
            finally:
                await asyncio.to_thread(ends.close)
    log.info("stopped")


def _open(config: CacheStoreSettings, ends: contextlib.ExitStack, health: HealthServer) -> Parts:
    """Open the folder and whatever works on it; ends: how each is closed, the last one first."""
    telemetry = Telemetry()
    if config.otlp_endpoint is not None:
        instance = config.own_address or config.listen
        telemetry = ExportingTelemetry.to(config.otlp_endpoint, instance)
    ends.callback(telemetry.close)
    store = Store(
        config.data_dir,
        config.memory_bytes,
        config.disk_bytes,
        policy=config.policy,
        admission=config.admission,
        leaves_only=config.reuse == "exact",
        telemetry=telemetry,
    )
    ends.callback(store.close)
    data_address = None if config.data_listen is None else split_address(config.data_listen)
    transports = DataServer(store, config.data_socket, data_address)
    ends.callback(transports.close)
    keeper = ReEncoder(store, _assignment(config), Pace(), time.monotonic)
    keeper.start()
    ends.callback(keeper.close)
    own = config.own_address or config.listen
    rejoin = CatchUp(store, config.cachestore, own, progress=health.set_progress)
    ends.callback(rejoin.close)
    replication = Replicator(store, config.cachestore if config.replication else None, own)
    ends.callback(replication.close)
    return Parts(store, transports, rejoin, replication)


async def _serve(config: CacheStoreSettings, parts: Parts, health: HealthServer) -> None:
    store = parts.store
    replication = parts.replication if config.cachestore is not None else None
    service = CacheStoreService(
        store, parts.transports.hello(), replication, gated=config.cachestore is not None
    )
    server = _listen(config.listen, service, health)
    await server.start()
    stopped = asyncio.ensure_future(until_stopped())
    try:
        # Before anybody gets a value: what the others know to be deleted is never served. They may
        # be starting, too, and ask the same of this one.
        if not await _started(parts.rejoin, stopped):
            return
        service.open()
        parts.transports.start()
        parts.replication.start()
        await server.set_ready()
        log.info("serving %d variants on port %d", len(store), server.port)
        await stopped
    finally:
        service.end_watches()
        await server.stop()
        await asyncio.to_thread(service.close)


async def _started(rejoin: CatchUp, stopped: asyncio.Future[None]) -> bool:
    """Start it; False if a stop was asked for meanwhile."""
    started = asyncio.ensure_future(asyncio.to_thread(rejoin.start))
    await asyncio.wait([started, stopped], return_when=asyncio.FIRST_COMPLETED)
    if stopped.done():
        await asyncio.to_thread(rejoin.close)
    await started
    return not stopped.done()


def _listen(listen: str, service: CacheStoreService, health: HealthServer) -> GrpcServer:
    try:
        return GrpcServer(listen, [SERVICE], service.register, health)
    except RuntimeError as error:
        raise InvalidInput(
            "RAGCACHE_LISTEN", f"{listen} is not free: {error}", "name another port"
        ) from error


def _assignment(config: CacheStoreSettings) -> PrecisionAssignment:
    match config.precision:
        case "harag":
            return HaRagAssignment()
        case "score":
            return ScoreAssignment(memory=MemoryBudget(pageable_bytes=config.memory_bytes))
        case precision:
            return FixedAssignment(precision)


def main() -> int:
    """Entry point."""
    reuse_freed_memory()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        config = CacheStoreSettings()
        logging.basicConfig(
            level=config.log_level.upper(),
            format="%(asctime)s %(levelname)s %(name)s %(message)s",
        )
        asyncio.run(serve(config))
    except InvalidInput as error:
        print(error, file=sys.stderr)
        return 2
    except RagCacheError as error:  # as of a disk that refuses: another start may do
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
