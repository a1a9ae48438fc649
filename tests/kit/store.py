"""Parts that the cache store's tests share: values, a store on disk, a server in process."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import xxhash

from ragcache_cachestore.api import data_connection
from ragcache_cachestore.api.data_server import DataServer
from ragcache_cachestore.api.grpc_service import SERVICE, CacheStoreService
from ragcache_cachestore.background import tier_mover
from ragcache_cachestore.cluster import orphan_collector, replicator
from ragcache_cachestore.state.store_state import StoreOptions
from ragcache_cachestore.storage import metadata_db
from ragcache_cachestore.store import Store
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import (
    Miss,
    Origin,
    Precision,
    Provenance,
    ValuePart,
    ValueShape,
    VariantInfo,
)
from ragcache_core.store_api import Ack, AsOf, NewVariant, PutCompletion, PutOutcome
from ragcache_kv.store_client.async_sharded import AsyncStoreClient
from ragcache_kv.store_client.client import StoreClient
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_kv.transport import liveness
from ragcache_kv.values.buffers import Verifier
from ragcache_kv.values.outgoing_value import ReadyValue
from ragcache_wire.peers.credentials import NO_CREDENTIALS, Credentials
from ragcache_wire.peers.peer_channel import open_blocking_channel
from ragcache_wire.server import GrpcServer
from ragcache_wire.v1 import cachestore_pb2_grpc
from tests.kit.limits import LIMIT_S, lengthen_limits

MIB = 1 << 20
TIMEOUT_S = 60.0


def key(chunk: int, prefix: int = 0) -> VariantKey:
    """A variant key by two small numbers."""
    return VariantKey(chunk.to_bytes(16), prefix.to_bytes(16))


def value(num_bytes: int, seed: int = 0) -> bytes:
    """Bytes that do not repeat, the same for the same arguments."""
    return random.Random(f"{num_bytes} {seed}").randbytes(num_bytes)


def checksum(raw: bytes | memoryview) -> int:
    """XXH3-64."""
    return xxhash.xxh3_64_intdigest(raw)


def checksummed_parts(raw: bytes, num_parts: int = 1) -> tuple[ValuePart, ...]:
    """Parts of nearly equal size."""
    ends = [len(raw) * n // num_parts for n in range(num_parts + 1)]
    pieces = [raw[begin:end] for begin, end in pairwise(ends)]
    return tuple(ValuePart(len(piece), checksum(piece)) for piece in pieces)


def info(num_bytes: int, *, exact: bool = True, precision: Precision | None = None) -> VariantInfo:
    """A description that fits a value of num_bytes."""
    return VariantInfo(256, num_bytes, 17, Provenance(exact), precision or Precision())


def variant(
    key: VariantKey,
    raw: bytes,
    *,
    exact: bool = True,
    precision: Precision | None = None,
    origin: Origin | None = None,
    shape: ValueShape | None = None,
    num_parts: int = 1,
    as_of: AsOf | None = None,
) -> NewVariant:
    """What a put of an opaque value says of it."""
    return NewVariant(
        key=key,
        info=info(len(raw), exact=exact, precision=precision),
        origin=origin or Origin(),
        shape=shape,
        part_bytes=tuple([part.num_bytes for part in checksummed_parts(raw, num_parts)]),
        value_format=1,
        as_of=as_of or AsOf(),
    )


def whole(variant: NewVariant, raw: bytes | memoryview) -> ReadyValue:
    """A value as it is put, with the checksums it has."""
    return ReadyValue.with_checksums(memoryview(raw), variant.part_bytes, variant.origin.cost_s)


def completion(variant: NewVariant, raw: bytes | memoryview) -> PutCompletion:
    """What is said of a value after its last byte."""
    sums = tuple(whole(variant, raw).wait_for_parts(0, 0.0))
    return PutCompletion(sums, variant.origin.cost_s)


def fill(views: Sequence[memoryview], raw: bytes) -> None:
    """Write a value into the views of an incoming."""
    at = 0
    for view in views:
        view[:] = raw[at : at + len(view)]
        at += len(view)


def put(
    store: Store, key: VariantKey, raw: bytes, *, ack: Ack = Ack.ACCEPTED, **about: Any
) -> PutOutcome:
    """Put as a transport does, having seen every delete so far."""
    about.setdefault("as_of", store.reads.lookup([]).as_of)
    incoming = store.puts.begin(variant(key, raw, **about), ack)
    if isinstance(incoming, PutOutcome):
        return incoming
    with incoming:
        fill(incoming.views, raw)
        return incoming.commit(completion(incoming.new, raw), ack)


def get(store: Store, key: VariantKey, *, exact: bool = False, domain: str = "") -> bytes | Miss:
    """Get as a transport does."""
    (lease,) = opened = store.reads.open([key], exact, domain)
    store.reads.note_opened(opened)
    if isinstance(lease, Miss):
        return lease
    raw = bytearray(lease.variant.info.num_bytes)
    if lease.on_disk:
        assert store.disk_tier.read_into(lease.copy.extents, [memoryview(raw)])
    else:
        raw = bytearray(b"".join(store.memory_tier.views(lease.copy.extents)))
    store.reads.release([lease.id])
    return bytes(raw)


@contextlib.contextmanager
def opened(
    folder: Path,
    *,
    memory_bytes: int = 16 * MIB,
    disk_bytes: int = 64 * MIB,
    policy: str = "lru",
    flush: bool = True,
    **settings: Any,
) -> Iterator[Store]:
    """A store, checked and closed afterwards. Not flush: as if it were killed."""
    store = Store(folder, StoreOptions(memory_bytes, disk_bytes, policy=policy, **settings))
    try:
        yield store
        store.check()
    finally:
        store.close(flush=flush)


@dataclass(frozen=True, slots=True)
class ServedStore:
    """A store behind a real gRPC server and, if asked for, its transports.

    client: of the fastest transport offered. stub: for calls that the client does not make.
    """

    service: CacheStoreService
    store: Store
    client: StoreClient
    stub: Any
    address: str


@contextlib.contextmanager
def serving(
    folder: Path,
    *,
    memory_bytes: int = 64 * MIB,
    disk_bytes: int = 256 * MIB,
    port: int = 0,
    transports: Sequence[str] = (),
    policy: str = "lru",
    free_bytes: Callable[[], int] | None = None,
    credentials: Credentials = NO_CREDENTIALS,
    **settings: Any,
) -> Iterator[ServedStore]:
    """Serve folder in a thread of its own, as a process would.

    transports: of "shared" and "socket", those offered beside "grpc". credentials: of the
    store and its clients. settings: of Store.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server")
    thread.start()
    with contextlib.ExitStack() as ends:
        ends.callback(_end_loop, loop, thread)
        options = StoreOptions(
            memory_bytes, disk_bytes, policy=policy, free_bytes=free_bytes, **settings
        )
        store = Store(folder, options)
        ends.callback(store.close)
        socket_path = folder / "transport.sock" if "shared" in transports else None
        data_server = DataServer(
            store, socket_path, ("127.0.0.1", 0) if "socket" in transports else None, credentials
        )
        data_server.start()
        ends.callback(data_server.close)
        service = CacheStoreService(store, data_server.hello())
        ends.callback(service.close)

        async def start() -> GrpcServer:
            server = GrpcServer(
                f"127.0.0.1:{port}", [SERVICE], service.register, credentials=credentials
            )
            await server.start()
            await server.set_ready()
            return server

        async def stop(server: GrpcServer) -> None:
            service.end_watches()
            await server.stop()

        server = asyncio.run_coroutine_threadsafe(start(), loop).result(TIMEOUT_S)
        ends.callback(
            lambda: asyncio.run_coroutine_threadsafe(stop(server), loop).result(TIMEOUT_S)
        )
        address = f"127.0.0.1:{server.port}"
        client = StoreClient(address, (*transports, "grpc"), credentials)
        ends.callback(client.close)
        channel = open_blocking_channel(address, credentials)
        ends.callback(channel.close)
        stub = cachestore_pb2_grpc.CacheStoreStub(channel)
        yield ServedStore(service, store, client, stub, address)


def lengthen_store_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen the limits of clients and stores in this process."""
    lengthen_limits(monkeypatch, StoreClient, ShardedStore, AsyncStoreClient)
    monkeypatch.setattr(liveness, "SILENT_S", LIMIT_S)
    monkeypatch.setattr(data_connection, "HELLO_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(tier_mover, "ALLOCATE_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(metadata_db, "STALL_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(orphan_collector, "CALL_TIMEOUT_S", LIMIT_S)
    for name in ("COPY_TIMEOUT_S", "CALL_TIMEOUT_S"):
        monkeypatch.setattr(replicator, name, LIMIT_S)


def _end_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def put_value(
    client: StoreClient,
    key: VariantKey,
    raw: bytes,
    *,
    ack: Ack = Ack.ACCEPTED,
    **about: Any,
) -> PutOutcome:
    """Put through the client, having seen every delete so far."""
    about.setdefault("as_of", client.lookup([], TIMEOUT_S).as_of)
    new = variant(key, raw, **about)
    return client.put(new, whole(new, raw), TIMEOUT_S, ack)


def get_value(client: StoreClient, key: VariantKey) -> bytes | None:
    """Get one value through the client; None for a miss."""
    ((_, found),) = client.get([key], TIMEOUT_S)
    return None if isinstance(found, Miss) else bytes(found.value)


def matches_checksums(sources: Iterable[memoryview], parts: Sequence[ValuePart]) -> bool:
    """Return whether sources, one after another, match the checksums of parts."""
    verifier = Verifier(parts)
    for source in sources:
        verifier.add(source)
        if not verifier.good:
            return False
    return verifier.complete and verifier.good
