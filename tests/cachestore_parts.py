"""Parts that the cache store's tests share: values, a store on disk, a server in process."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc

from ragcache_cachestore.disk import Disk
from ragcache_cachestore.entry import Entry
from ragcache_cachestore.pieces import PieceCutter, Pieces, checksum
from ragcache_cachestore.service import SERVICE, CacheStoreService
from ragcache_cachestore.store import Store
from ragcache_core.keys import VariantKey
from ragcache_core.reuse import Provenance, VariantInfo
from ragcache_wire.cachestore_client import CacheStoreClient
from ragcache_wire.server import GrpcServer
from ragcache_wire.v1 import cachestore_pb2_grpc

MIB = 1 << 20
TIMEOUT_S = 30.0


def key(chunk: int, prefix: int = 0) -> VariantKey:
    """A variant key by two small numbers."""
    return VariantKey(chunk.to_bytes(16), prefix.to_bytes(16))


def value(num_bytes: int, seed: int = 0) -> bytes:
    """Bytes that do not repeat, the same for the same arguments."""
    return random.Random(f"{num_bytes} {seed}").randbytes(num_bytes)


def pieces_of(raw: bytes) -> Pieces:
    """A value as the store holds it."""
    cutter = PieceCutter(len(raw))
    cutter.add(raw)
    return cutter.finish()


def info(num_bytes: int, *, exact: bool = True) -> VariantInfo:
    """A description that fits a value of num_bytes."""
    return VariantInfo(256, num_bytes, 17, Provenance(exact))


def entry(raw: bytes, slot: int = 1, *, exact: bool = True) -> Entry:
    """The entry of a value."""
    return Entry(slot, info(len(raw), exact=exact), checksum([raw]), value_format=1)


async def put(store: Store, key: VariantKey, raw: bytes, *, exact: bool = True) -> bool:
    """Put as the service does; whether it was stored."""
    about = info(len(raw), exact=exact)
    if not store.wants(key, about):
        return False
    with store.put(key, about, checksum([raw]), 1) as arrival:
        arrival.add(raw)
        return await arrival.finish()


@contextlib.asynccontextmanager
async def opened(
    folder: Path,
    *,
    memory_bytes: int = 64 * MIB,
    disk_bytes: int = 256 * MIB,
    open_disk: Callable[[Path], Disk] = Disk,
) -> AsyncIterator[Store]:
    """A store on a real disk tier, closed afterwards."""
    store = Store(open_disk(folder), memory_bytes, disk_bytes)
    try:
        yield store
        store.index.check()
        store.memory.check()
    finally:
        await store.close()


@dataclass(frozen=True, slots=True)
class Served:
    """A store behind a real gRPC server. stub: for calls that the client does not make."""

    service: CacheStoreService
    store: Store
    client: CacheStoreClient
    stub: cachestore_pb2_grpc.CacheStoreStub
    address: str


@contextlib.contextmanager
def serving(
    folder: Path,
    *,
    memory_bytes: int = 64 * MIB,
    disk_bytes: int = 256 * MIB,
    port: int = 0,
    free_bytes: Callable[[], int] | None = None,
) -> Iterator[Served]:
    """Serve folder in a thread of its own, as a process would."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server")
    thread.start()

    async def start() -> tuple[Store, CacheStoreService, GrpcServer]:
        store = Store(Disk(folder, free_bytes=free_bytes), memory_bytes, disk_bytes)
        service = CacheStoreService(store)
        server = GrpcServer(f"127.0.0.1:{port}", [SERVICE], service.register)
        await server.start()
        await server.set_ready()
        return store, service, server

    async def stop(store: Store, server: GrpcServer) -> None:
        await server.stop()
        await store.close()

    try:
        store, service, server = asyncio.run_coroutine_threadsafe(start(), loop).result(TIMEOUT_S)
        address = f"127.0.0.1:{server.port}"
        client = CacheStoreClient(address)
        channel = grpc.insecure_channel(address)
        try:
            yield Served(
                service, store, client, cachestore_pb2_grpc.CacheStoreStub(channel), address
            )
        finally:
            channel.close()
            client.close()
            asyncio.run_coroutine_threadsafe(stop(store, server), loop).result(TIMEOUT_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def put_value(client: CacheStoreClient, key: VariantKey, raw: bytes, *, exact: bool = True) -> bool:
    """Put through the client; whether it was stored."""
    about = info(len(raw), exact=exact)
    return client.put(key, about, memoryview(raw), checksum([raw]), 1, TIMEOUT_S)


def get_value(client: CacheStoreClient, key: VariantKey) -> bytes | None:
    """Get one value through the client; None for a miss."""
    ((_, found),) = client.get([key], TIMEOUT_S)
    return None if found is None else bytes(found.value)
