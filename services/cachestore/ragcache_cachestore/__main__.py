"""Run a cache store: ``python -m ragcache_cachestore``, configured by RAGCACHE_* variables."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from dataclasses import dataclass
from functools import partial

from ragcache_cachestore.api.data_server import DataServer, allow_many_sockets
from ragcache_cachestore.api.grpc_service import SERVICE, CacheStoreService
from ragcache_cachestore.background.graded_assignment import GradedAssignment
from ragcache_cachestore.background.re_encoder import Pace, ReEncoder
from ragcache_cachestore.cluster.catch_up import CatchUp
from ragcache_cachestore.cluster.orphan_collector import OrphanCollector, ask_shard
from ragcache_cachestore.cluster.replicator import Replicator
from ragcache_cachestore.state.store_state import StoreOptions
from ragcache_cachestore.storage.malloc import reuse_freed_memory
from ragcache_cachestore.store import Store
from ragcache_cachestore.telemetry.exporter import PART, Telemetry
from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_wire.http_server import HealthServer
from ragcache_wire.process import end_on_stop, keep_collections_short
from ragcache_wire.server import GrpcServer, until_stopped
from ragcache_wire.settings import CacheStoreSettings
from ragcache_wire.settings.field_types import split_address
from ragcache_wire.telemetry.log_format import start_logging

log = logging.getLogger("ragcache_cachestore")

SWITCH_INTERVAL_S = 5e-4
"""How long a thread may keep Python's lock while another one waits for it.

Most work of a store takes microseconds. With Python's default of 5 ms, a get would mostly wait for
this lock.
"""


@dataclass(frozen=True, slots=True)
class ShardProcess:
    """The components of a cache store process, besides its gRPC server."""

    store: Store
    data_server: DataServer
    catch_up: CatchUp
    replicator: Replicator
    orphan_collector: OrphanCollector


async def serve(config: CacheStoreSettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        InvalidInput: An address or the folder cannot be used.
    """
    telemetry = Telemetry.start(config.otlp_endpoint, config.own_address or config.listen)
    async with HealthServer(config.health_listen, telemetry.collectors) as health:
        health.set_progress("opening the disk tier")
        with contextlib.ExitStack() as resources:
            resources.callback(telemetry.close)
            # In a thread, because health must answer while many variants are loaded.
            shard = await asyncio.to_thread(_open, config, telemetry, resources, health)
            try:
                await _serve(config, shard, health)
            finally:
                await asyncio.to_thread(resources.close)
    log.info("cachestore: stopped")


def _open(
    config: CacheStoreSettings,
    telemetry: Telemetry,
    resources: contextlib.ExitStack,
    health: HealthServer,
) -> ShardProcess:
    """Open the store and the components that use it.

    Args:
        resources: Closes them in reverse order.
    """
    own_address, credentials = config.own_address or config.listen, config.credentials
    options = StoreOptions(
        config.memory_bytes,
        config.disk_bytes,
        owns_memory=config.owns_memory,
        policy=config.policy,
        admission=config.admission,
        leaves_only=config.reuse == "exact",
        telemetry=telemetry,
        disk_keys=config.disk_key_file,
    )
    store = Store(config.data_dir, options)
    resources.callback(store.close)
    data_address = None if config.data_listen is None else split_address(config.data_listen)
    data_server = DataServer(store, config.data_socket, data_address, credentials)
    resources.callback(data_server.close)
    re_encoder = ReEncoder(
        store.variants,
        GradedAssignment(config.precision, config.memory_bytes),
        Pace(),
        time.monotonic,
    )
    re_encoder.start()
    resources.callback(re_encoder.close)
    members = config.cachestore
    catch_up = CatchUp(
        store, members, own_address, progress=health.set_progress, credentials=credentials
    )
    resources.callback(catch_up.close)
    replicator = Replicator(
        store, members if config.replication else None, own_address, credentials=credentials
    )
    resources.callback(replicator.close)
    # Under `blend` a variant can be reused although its parent is not stored.
    chained = members if config.reuse == "exact" else None
    orphan_collector = OrphanCollector(
        store, chained, own_address, ask=partial(ask_shard, credentials=credentials)
    )
    resources.callback(orphan_collector.close)
    return ShardProcess(store, data_server, catch_up, replicator, orphan_collector)


async def _serve(config: CacheStoreSettings, shard: ShardProcess, health: HealthServer) -> None:
    is_sharded = config.cachestore is not None
    service = CacheStoreService(
        shard.store,
        shard.data_server.hello(),
        shard.replicator if is_sharded else None,
        gated=is_sharded,
    )
    server = _listen(config, service, health)
    await server.start()
    stopped = asyncio.ensure_future(until_stopped())
    try:
        # The server is gated until this shard has the deletes of its peers, so that it never
        # serves a deleted value. The peers may start too, and ask this shard for its deletes.
        if not await _start_catch_up(shard.catch_up, stopped):
            return
        service.open()
        shard.data_server.start()
        shard.replicator.start()
        shard.orphan_collector.start()
        await server.set_ready()
        log.info("cachestore: serving variants=%d port=%d", len(shard.store), server.port)
        await stopped
    finally:
        service.end_watches()
        await server.stop()
        await asyncio.to_thread(service.close)


async def _start_catch_up(catch_up: CatchUp, stopped: asyncio.Future[None]) -> bool:
    """Start the catch-up. Return False if the process was told to stop meanwhile."""
    started = asyncio.ensure_future(asyncio.to_thread(catch_up.start))
    await asyncio.wait([started, stopped], return_when=asyncio.FIRST_COMPLETED)
    if stopped.done():
        await asyncio.to_thread(catch_up.close)
    await started
    return not stopped.done()


def _listen(
    config: CacheStoreSettings, service: CacheStoreService, health: HealthServer
) -> GrpcServer:
    listen, credentials = config.listen, config.credentials
    try:
        return GrpcServer(listen, [SERVICE], service.register, health, credentials=credentials)
    except RuntimeError as error:
        raise InvalidInput(
            "RAGCACHE_LISTEN", f"{listen} is in use: {error}", "name another port"
        ) from error


def main() -> int:
    """Run the service. Return the exit status."""
    reuse_freed_memory()
    allow_many_sockets()
    end_on_stop()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        config = CacheStoreSettings()
        start_logging(config.log_level, config.log_format, PART)
        keep_collections_short()
        asyncio.run(serve(config))
    except InvalidInput as error:
        print(error, file=sys.stderr)
        return 2
    except RagCacheError as error:  # a full disk, for example: another start may succeed
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
