"""Run a cache store: ``python -m ragcache_cachestore``, configured by RAGCACHE_* variables."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from ragcache_cachestore.allocator import reuse_freed_memory
from ragcache_cachestore.config import Config
from ragcache_cachestore.disk import Disk
from ragcache_cachestore.service import SERVICE, CacheStoreService
from ragcache_cachestore.store import Store
from ragcache_core.errors import InvalidInput
from ragcache_wire.health_server import HealthServer
from ragcache_wire.server import GrpcServer, until_stopped

log = logging.getLogger("ragcache_cachestore")


async def serve(config: Config) -> None:
    """Serve until SIGTERM or SIGINT. Raises InvalidInput for an address or folder not usable."""
    async with HealthServer(config.health_listen) as health:
        health.set_progress("opening the disk tier")
        # In a thread: with many variants it takes a while, in which health is asked for.
        store = await asyncio.to_thread(_open, config)
        try:
            await _serve(config, store, health)
        finally:
            await store.close()
    log.info("stopped")


def _open(config: Config) -> Store:
    disk = Disk(config.data_dir, config.disk_bytes)
    return Store(disk, config.memory_bytes, config.disk_bytes)


async def _serve(config: Config, store: Store, health: HealthServer) -> None:
    server = _listen(config.listen, CacheStoreService(store), health)
    await server.start()
    try:
        await server.set_ready()
        log.info(
            "serving %d variants, %d bytes, on port %d",
            len(store.index),
            store.index.used_bytes,
            server.port,
        )
        await until_stopped()
    finally:
        await server.stop()


def _listen(listen: str, service: CacheStoreService, health: HealthServer) -> GrpcServer:
    try:
        return GrpcServer(listen, [SERVICE], service.register, health)
    except RuntimeError as error:
        raise InvalidInput(
            "RAGCACHE_LISTEN", f"{listen} is not free: {error}", "name another port"
        ) from error


def main() -> int:
    """Entry point."""
    reuse_freed_memory()
    try:
        config = Config.from_environment(os.environ)
        logging.basicConfig(
            level=config.log_level.upper(),
            format="%(asctime)s %(levelname)s %(name)s %(message)s",
        )
        asyncio.run(serve(config))
    except InvalidInput as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
