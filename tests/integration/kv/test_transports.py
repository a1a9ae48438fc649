"""All transports carry the same values, keep leases while they read, and end in time."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from harness.processes import free_port
from ragcache_cachestore.api import data_connection, data_server
from ragcache_cachestore.api.data_server import DataServer
from ragcache_cachestore.api.grpc_service import SERVICE, CacheStoreService
from ragcache_cachestore.puts import IncomingPut
from ragcache_cachestore.reads import MAX_REPORTED_TIMES
from ragcache_cachestore.state.store_state import StoreOptions
from ragcache_cachestore.store import Store
from ragcache_core.errors import InvalidInput, RagCacheError, TooLarge, Unavailable
from ragcache_core.eviction import DEFAULT_POLICY
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, Origin, Provenance, Tier, ValueShape, VariantInfo
from ragcache_core.store_api import (
    MAX_KEYS,
    Ack,
    AsOf,
    Deletion,
    LookupKey,
    NewVariant,
    PutOutcome,
    ReportedUses,
    VariantUse,
)
from ragcache_kv.store_client import client as store_client
from ragcache_kv.store_client.client import TRANSPORTS, StoreClient
from ragcache_kv.transport import framed_transport, liveness
from ragcache_kv.transport.framed_transport import send_credential
from ragcache_kv.transport.framing import ConnectionBroken, FramedConnection, FrameKind, frame
from ragcache_kv.transport.liveness import SILENT_S
from ragcache_kv.transport.shared_memory_transport import SharedMemoryTransport
from ragcache_kv.values.buffers import checksummed_parts
from ragcache_kv.values.conversions import to_get_request, to_key, to_put_header
from ragcache_kv.values.outgoing_value import IncompleteValue, OutgoingValue, ReadyValue
from ragcache_kv.values.stored_value import StoredValue
from ragcache_wire.server import GrpcServer
from ragcache_wire.status import NoAnswer
from ragcache_wire.v1 import cachestore_pb2 as pb
from tests.kit.store import whole
from tests.kit.wait import wait_until

TIMEOUT_S = 60.0
MIB = 1 << 20

R = TypeVar("R")


def key(number: int) -> VariantKey:
    return VariantKey(hashlib.blake2b(b"%d" % number, digest_size=16).digest(), bytes(16))


def new(number: int, sizes: list[int], exact: bool = True) -> tuple[NewVariant, memoryview]:
    """Return a variant with parts of sizes, and random bytes that depend on number."""
    value = memoryview(np.random.default_rng(number).bytes(sum(sizes)))
    info = VariantInfo(8, len(value), 3, Provenance(exact=exact))
    origin = Origin(domain="public", document="d")
    shape = _shape_of(sizes, info.num_tokens)
    return NewVariant(key(number), info, origin, shape, tuple(sizes), 7), value


def _shape_of(sizes: list[int], num_tokens: int) -> ValueShape | None:
    """Return a shape with parts of sizes; None (opaque bytes) if the sizes differ."""
    head_dim, rest = divmod(sizes[0], 2 * num_tokens * 2)
    if rest or len(set(sizes)) > 1:
        return None
    return ValueShape(len(sizes), 1, head_dim, "bfloat16")


def put(
    client: StoreClient,
    number: int,
    sizes: list[int],
    exact: bool = True,
    ack: Ack = Ack.ACCEPTED,
) -> memoryview:
    """Put the value of ``new``, and return it."""
    variant, value = new(number, sizes, exact)
    client.put(variant, whole(variant, value), TIMEOUT_S, ack)
    return value


class Served:
    """A store with its gRPC and data servers, in this process."""

    def __init__(
        self, folder: Path, memory_bytes: int, disk_bytes: int, policy: str = DEFAULT_POLICY
    ) -> None:
        self.store = Store(folder / "data", StoreOptions(memory_bytes, disk_bytes, policy=policy))
        self.transports = DataServer(self.store, folder / "transport.sock", ("127.0.0.1", 0))
        self.transports.start()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._service = CacheStoreService(self.store, self.transports.hello())
        self._server = self._run(self._start())
        self.address = f"127.0.0.1:{self._server.port}"

    async def _start(self) -> GrpcServer:
        server = GrpcServer("127.0.0.1:0", [SERVICE], self._service.register)
        await server.start()
        return server

    def interrupt(self) -> None:
        """Close every connection in the store."""
        with self.transports._lock:  # one that has greeted its client may not be listed yet
            connections = list(self.transports._connections)
        for connection in connections:
            connection.channel.interrupt()

    def _run(self, work: Coroutine[Any, Any, R]) -> R:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    def close(self) -> None:
        self.transports.close()
        self._service.end_watches()
        self._run(self._server.stop())
        self._service.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.store.close()


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    with contextlib.ExitStack() as ends:

        def start(
            memory_bytes: int = 64 * MIB, disk_bytes: int = 256 * MIB, policy: str = DEFAULT_POLICY
        ) -> Served:
            served = Served(tmp_path, memory_bytes, disk_bytes, policy)
            ends.callback(served.close)
            return served

        yield start


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve()


@contextlib.contextmanager
def client_of(address: str, transport: str) -> Iterator[StoreClient]:
    client = StoreClient(address, [transport])
    try:
        yield client
    finally:
        client.close()


@pytest.fixture(params=TRANSPORTS)
def client(request: pytest.FixtureRequest, served: Served) -> Iterator[StoreClient]:
    with client_of(served.address, request.param) as client:
        yield client


def only(client: StoreClient, number: int, **options: object) -> StoredValue | Miss:
    [(found_key, found)] = client.get([key(number)], TIMEOUT_S, **options)  # type: ignore[arg-type]
    assert found_key == key(number)
    return found


SIZES = [
    [1],
    [70_000, 1, 65_536],
    [3 * MIB + 17],
    [300_000] * 8,
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_get_returns_the_value_that_was_put(client: StoreClient, sizes: list[int]) -> None:
    variant, value = new(1, sizes)
    assert client.put(variant, whole(variant, value), TIMEOUT_S) is PutOutcome.STORED
    assert client.put(variant, whole(variant, value), TIMEOUT_S) is PutOutcome.ALREADY_STORED
    found = only(client, 1)
    assert isinstance(found, StoredValue)
    assert found.value == value
    assert (found.info, found.parts, found.shape, found.value_format) == (
        variant.info,
        checksummed_parts(value, sizes),
        variant.shape,
        variant.value_format,
    )
    assert found.tier is Tier.MEMORY


def test_a_value_lands_in_the_callers_own_memory(client: StoreClient) -> None:
    value = put(client, 1, [100_000, 50_000])
    memory = np.zeros(75_000, np.uint16)  # of another type than bytes
    found = only(client, 1, allocate=lambda info: memory.data)
    assert isinstance(found, StoredValue)
    assert memory.tobytes() == value


def test_too_little_memory_is_refused(client: StoreClient) -> None:
    put(client, 1, [1000])
    with pytest.raises(InvalidInput, match="allocate"):
        only(client, 1, allocate=lambda info: memoryview(bytearray(999)))
    assert isinstance(only(client, 1), StoredValue)


def test_values_arrive_in_order_and_misses_have_reasons(
    client: StoreClient, served: Served
) -> None:
    for number, exact in ((1, True), (2, False), (3, True)):
        put(client, number, [10_000 * number], exact)
    client.delete(Deletion(bytes(range(16)), chunks=(key(3).chunk,)))
    keys = [key(number) for number in (4, 2, 3, 1)]
    found = dict(client.get(keys, TIMEOUT_S, exact=True))
    assert list(found) == keys
    assert found[key(4)] is Miss.NEVER_STORED
    assert found[key(2)] is Miss.APPROXIMATE
    assert found[key(3)] is Miss.DELETED
    one = found[key(1)]
    assert isinstance(one, StoredValue)
    assert one.value == new(1, [10_000])[1]
    assert only(client, 1, domain="other") is Miss.OTHER_DOMAIN


def test_more_keys_than_one_call_takes(client: StoreClient) -> None:
    for number in range(0, 150, 3):
        put(client, number, [100 + number])
    keys = [key(number) for number in range(150)]
    for number, (found_key, found) in enumerate(client.get(keys, TIMEOUT_S)):
        assert found_key == keys[number]
        if number % 3:
            assert found is Miss.NEVER_STORED
        else:
            assert isinstance(found, StoredValue)
            assert found.value == new(number, [100 + number])[1]


def test_a_get_of_nothing_returns_nothing(client: StoreClient) -> None:
    assert list(client.get([], TIMEOUT_S)) == []


def test_values_on_disk_are_read(client: StoreClient, served: Served) -> None:
    for number in range(12):  # more than memory holds
        variant, value = new(number, [4 * MIB, 4 * MIB])
        assert (
            client.put(variant, whole(variant, value), TIMEOUT_S, Ack.DURABLE) is PutOutcome.STORED
        )
    tiers = set()
    for number in range(12):
        found = only(client, number)
        assert isinstance(found, StoredValue)
        assert found.value == new(number, [4 * MIB, 4 * MIB])[1]
        tiers.add(found.tier)
    assert tiers == {Tier.MEMORY, Tier.DISK}


@pytest.mark.parametrize("rotten", [0, MIB, 6 * MIB - 1, None])
@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("tier", [Tier.MEMORY, Tier.DISK])
def test_both_reader_threads_verify_their_pieces(
    serve: Serve, rotten: int | None, busy: bool, tier: Tier
) -> None:
    """Two threads read a large value, or one if the other is busy."""
    served = serve(memory_bytes=8 * MIB, policy="lru")
    free = threading.Event()
    with client_of(served.address, "shared") as client:
        for number in (1, 2):  # there is room for one in memory
            variant, value = new(number, [MIB // 2] * 12)
            assert (
                client.put(variant, whole(variant, value), TIMEOUT_S, Ack.DURABLE)
                is PutOutcome.STORED
            )
        number = 1 if tier is Tier.DISK else 2
        [lease] = served.store.reads.open([key(number)])
        assert not isinstance(lease, Miss)
        assert lease.tier is tier
        if rotten is not None:
            [extent] = lease.copy.extents
            fd = served.store.disk_tier.fd if lease.on_disk else served.store.memory_tier.fd
            byte = os.pread(fd, 1, extent.offset + rotten)
            os.pwrite(fd, bytes([byte[0] ^ 1]), extent.offset + rotten)
        served.store.reads.release([lease.id])
        transport = client._transport
        assert isinstance(transport, SharedMemoryTransport)
        if busy:
            transport._reader_pair._second.submit(free.wait)
        try:
            found = [only(client, number) for _ in range(1 if rotten is not None else 2)]
        finally:
            free.set()
        if rotten is not None:
            assert found == [Miss.CORRUPT]
        else:
            assert [one.value for one in found] == [new(number, [MIB // 2] * 12)[1]] * 2


def test_a_corrupt_value_is_a_miss_and_dropped(client: StoreClient, served: Served) -> None:
    for number in (1, 2):
        put(client, number, [100_000, 100_000])
    [lease] = served.store.reads.open([key(1)])
    assert not isinstance(lease, Miss)
    served.store.memory_tier.views(lease.copy.extents)[-1][-1] ^= 1
    served.store.reads.release([lease.id])
    read = dict(client.get([key(1), key(2)], TIMEOUT_S))
    assert read[key(1)] is Miss.CORRUPT
    assert isinstance(read[key(2)], StoredValue)
    wait_until(lambda: served.store.stats().corrupt == 1)
    found = only(client, 1)  # from disk, if it was there already
    assert isinstance(found, Miss) or found.value == new(1, [100_000, 100_000])[1]
    assert isinstance(only(client, 2), StoredValue)


@pytest.mark.parametrize("transport", ["shared", "socket"])
def test_a_corrupt_value_can_be_put_again_at_once(
    served: Served, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant, value = new(1, [100_000])
    with (
        client_of(served.address, transport) as client,
        client_of(served.address, transport) as other,
    ):
        client.put(variant, whole(variant, value), TIMEOUT_S, Ack.DURABLE)
        other.connect(TIMEOUT_S)
        [lease] = served.store.reads.open([key(1)])
        assert not isinstance(lease, Miss)
        served.store.memory_tier.views(lease.copy.extents)[-1][-1] ^= 1
        held = served.store.state.catalog.get(key(1))
        assert held is not None
        assert held.disk is not None
        os.pwrite(served.store.disk_tier.fd, b"rot", held.disk.extents[0].offset)
        served.store.reads.release([lease.id])
        verify = served.store.mover.verify

        def slowly(*copy: Any) -> bool:
            time.sleep(0.3)
            return verify(*copy)

        monkeypatch.setattr(served.store.mover, "verify", slowly)
        assert only(client, 1) is Miss.CORRUPT  # in memory
        assert only(client, 1) is Miss.CORRUPT  # and on disk
        assert other.put(variant, whole(variant, value), TIMEOUT_S) is PutOutcome.STORED


def test_a_put_with_a_wrong_checksum_is_refused(client: StoreClient) -> None:
    variant, value = new(1, [100_000])
    wrong = memoryview(bytearray(value))
    wrong[5] ^= 1
    with pytest.raises(InvalidInput, match="checksum"):
        client.put(
            variant, ReadyValue(wrong, whole(variant, value).wait_for_parts(0, 0.0)), TIMEOUT_S
        )
    assert only(client, 1) is Miss.NEVER_STORED
    assert client.put(variant, whole(variant, value), TIMEOUT_S) is PutOutcome.STORED


def test_errors_are_the_same_on_every_transport(client: StoreClient) -> None:
    variant, value = new(1, [100])
    with pytest.raises(InvalidInput, match="value: has 99 bytes"):
        client.put(variant, whole(variant, value[:99]), TIMEOUT_S)
    after = Origin(prefix_chunks=(key(1).chunk,) * 5000)
    with pytest.raises(TooLarge) as many:
        client.put(replace(variant, origin=after), whole(variant, value), TIMEOUT_S)
    assert many.value.field == "header.origin.prefix_chunks"
    with pytest.raises(InvalidInput) as unnamed:
        client.put(replace(variant, origin=Origin(domain="")), whole(variant, value), TIMEOUT_S)
    assert unnamed.value.field == "header.origin.domain"
    assert client.put(variant, whole(variant, value), TIMEOUT_S) is PutOutcome.STORED


class Coming(OutgoingValue):
    """A value whose parts become ready when the test says so."""

    def __init__(self, variant: NewVariant, value: memoryview) -> None:
        super().__init__(memoryview(bytearray(len(value))))
        self._from, self._sizes = value, variant.part_bytes
        self._sums = [part.checksum for part in checksummed_parts(value, self._sizes)]
        self._changed = threading.Condition()
        self._come = 0
        self._over: bool | None = None

    def come(self, count: int) -> None:
        with self._changed:
            begin, end = (sum(self._sizes[:n]) for n in (self._come, count))
            self.raw[begin:end] = self._from[begin:end]
            self._come = count
            self._changed.notify_all()

    def end(self, *, well: bool) -> None:
        with self._changed:
            self._over = well
            self._changed.notify_all()

    def wait_for_parts(self, done: int, deadline: float) -> list[int]:
        return self._await(deadline, lambda: self._sums[done : self._come])

    def wait_until_final(self, deadline: float) -> float:
        return 1.5 if self._await(deadline, lambda: self._over) else 0.0

    def _await(self, deadline: float, get: Callable[[], R]) -> R:
        with self._changed:
            left_s = deadline - time.monotonic()
            self._changed.wait_for(lambda: get() or self._over is False, left_s)
            if not get():
                raise IncompleteValue("it does not come")
            return get()


@contextlib.contextmanager
def putting(
    client: StoreClient, variant: NewVariant, value: OutgoingValue, timeout_s: float = TIMEOUT_S
) -> Iterator[Future[PutOutcome]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(client.put, variant, value, timeout_s)


@pytest.fixture
def incoming_puts(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[IncomingPut]:
    """Return a list that gets the puts which the store accepts from now on."""
    incoming_puts: list[IncomingPut] = []
    begin = served.store.puts.begin

    def begin_put(*args: Any) -> IncomingPut | PutOutcome:
        begun = begin(*args)
        if isinstance(begun, IncomingPut):
            incoming_puts.append(begun)
        return begun

    monkeypatch.setattr(served.store.puts, "begin", begin_put)
    return incoming_puts


@pytest.mark.parametrize("sizes", [[70_000] * 4, [MIB, 1, 700_000, 3], [100, 100, 100, 100]])
def test_parts_reach_the_store_before_the_next_ones_are_computed(
    served: Served, client: StoreClient, incoming_puts: list[IncomingPut], sizes: list[int]
) -> None:
    variant, value = new(1, sizes)
    coming = Coming(variant, value)
    with putting(client, variant, coming) as put:
        for count in (1, 2, 4):
            coming.come(count)
            so_far = sum(sizes[:count])
            wait_until(lambda: len(incoming_puts) == 1)
            there = incoming_puts[0]
            wait_until(lambda: b"".join(there.views)[:so_far] == value[:so_far])  # noqa: B023
            if client.transport == "shared" and count < 4:
                wait_until(lambda: there.sums.num_bytes == so_far)  # noqa: B023
            assert served.store.reads.open([key(1)]) == [Miss.NEVER_STORED]
        assert not put.done()  # all parts are ready, but not known to be right yet
        coming.end(well=True)
        assert put.result(TIMEOUT_S) is PutOutcome.STORED
    found = only(client, 1)
    assert isinstance(found, StoredValue)
    assert (found.value, found.parts) == (value, checksummed_parts(value, sizes))
    exported = served.store.variants.export(key(1))
    assert exported is not None
    assert exported[1].wait_until_final(0.0) == 1.5
    assert len(incoming_puts) == 1


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_an_incomplete_value_leaves_nothing(
    served: Served, client: StoreClient, incoming_puts: list[IncomingPut], count: int
) -> None:
    variant, value = new(1, [MIB] * 4)
    coming = Coming(variant, value)
    with putting(client, variant, coming) as put:
        coming.come(count)
        if count:
            wait_until(lambda: bool(incoming_puts))
        coming.end(well=False)
        with pytest.raises(IncompleteValue):
            put.result(TIMEOUT_S)
    assert only(client, 1) is Miss.NEVER_STORED
    wait_until(lambda: served.store.state.incoming_bytes == 0)
    wait_until(lambda: served.store.stats().memory_bytes == 0)  # at once, not after a lease's time
    assert client.put(variant, whole(variant, value), TIMEOUT_S) is PutOutcome.STORED


def test_a_value_that_times_out_is_no_failure_of_the_store(
    served: Served, client: StoreClient
) -> None:
    variant, value = new(1, [MIB] * 4)
    coming = Coming(variant, value)
    coming.come(2)
    client.connect(TIMEOUT_S)
    with pytest.raises(IncompleteValue):
        client.put(variant, coming, 2.0)
    assert not client._needs_check
    coming.come(4)
    coming.end(well=True)
    assert client.put(variant, coming, TIMEOUT_S) is PutOutcome.STORED


@pytest.mark.parametrize("said", [[4 * MIB + 1], [MIB, MIB - 1]])
def test_a_client_that_reports_impossible_progress_is_disconnected(
    served: Served, said: list[int]
) -> None:
    channel = connect(served, "shared")
    begin_put(channel, 1)
    for num_bytes in said:
        channel.send(FrameKind.WRITTEN, pb.PutProgress(num_bytes=num_bytes))
    with pytest.raises(ConnectionBroken):
        channel.receive(MIB)
    channel.close()
    assert served.store.reads.open([key(1)]) == [Miss.NEVER_STORED]


def test_a_completion_of_another_value_is_refused(served: Served) -> None:
    for transport in ("shared", "socket"):
        channel = connect(served, transport)
        value = begin_put(channel, 1)
        if transport == "socket":
            channel.send_raw(value)
        channel.send(FrameKind.COMMIT, pb.PutCompletion(checksums=[1, 2]))
        kind, payload = channel.receive(MIB)
        assert kind == FrameKind.ERROR
        assert pb.DataError.FromString(bytes(payload)).field == "completion.checksums"
        channel.close()
    assert served.store.reads.open([key(1)]) == [Miss.NEVER_STORED]


def test_a_put_across_a_delete_stores_nothing(client: StoreClient) -> None:
    variant, value = new(1, [100])
    as_of = client.lookup([LookupKey.for_variant(key(1))]).as_of
    client.delete(Deletion(bytes(range(16)), chunks=(key(1).chunk,)))
    for seen in (as_of, AsOf()):
        planned = replace(variant, as_of=seen)
        assert client.put(planned, whole(planned, value), TIMEOUT_S) is PutOutcome.DELETED
    planned = replace(variant, as_of=client.lookup([LookupKey.for_variant(key(1))]).as_of)
    assert client.put(planned, whole(planned, value), TIMEOUT_S) is PutOutcome.STORED


def test_threads_share_a_client(client: StoreClient) -> None:
    for number in range(8):
        put(client, number, [200_000])
    failures: list[object] = []

    def read(seed: int) -> None:
        for step in range(20):
            number = (seed + step) % 8
            found = only(client, number)
            if not isinstance(found, StoredValue) or found.value != new(number, [200_000])[1]:
                failures.append(found)

    threads = [threading.Thread(target=read, args=[i]) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_best_transport_is_chosen_and_logged(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO, "ragcache.store"):
        client = StoreClient(served.address)
        assert client.transport == ""
        client.connect(TIMEOUT_S)
        assert client.transport == "shared"
        assert "transport=shared" in caplog.text
        client.close()
        (served.transports._path or Path()).unlink()
        client = StoreClient(served.address)
        client.connect(TIMEOUT_S)
        assert client.transport == "socket"
        client.close()
    # As in another pod, which has no such socket: it is not tried, now or later.
    assert "connect failed" not in caplog.text


def test_another_stores_socket_is_not_used(serve: Serve, tmp_path: Path) -> None:
    served = serve()
    (tmp_path / "other").mkdir()
    other = Served(tmp_path / "other", MIB, MIB)
    try:
        path = tmp_path / "transport.sock"
        path.unlink()
        (tmp_path / "other" / "transport.sock").rename(path)
        client = StoreClient(served.address)
        client.connect(TIMEOUT_S)
        assert client.transport == "socket"
        client.close()
    finally:
        other.close()


def test_leases_end_soon_after_reading(served: Served) -> None:
    for transport in ("shared", "socket"):
        with client_of(served.address, transport) as client:
            put(client, 1, [100_000])
            assert isinstance(only(client, 1), StoredValue)
            wait_until(lambda: served.store.stats().leases == 0)


@pytest.mark.parametrize("transport", ["shared", "socket"])
def test_what_is_being_read_is_not_overwritten(serve: Serve, transport: str) -> None:
    served = serve(memory_bytes=8 * MIB, disk_bytes=MIB)  # the disk holds none of these
    with client_of(served.address, transport) as client:
        values = {}
        for number in (1, 2):
            variant, values[number] = new(number, [MIB, MIB])
            client.put(variant, whole(variant, values[number]), TIMEOUT_S)
        found = client.get([key(1), key(2)], TIMEOUT_S)
        _, first = next(found)
        assert isinstance(first, StoredValue)
        assert first.value == values[1]
        for number in range(10, 30):
            variant, value = new(number, [2 * MIB])
            with contextlib.suppress(Unavailable):
                client.put(variant, whole(variant, value), TIMEOUT_S)
        [(_, second)] = found
        assert isinstance(second, StoredValue)
        assert second.value == values[2]


@pytest.mark.parametrize("transport", ["shared", "socket"])
def test_a_reader_that_stops_early_holds_nothing(served: Served, transport: str) -> None:
    with client_of(served.address, transport) as client:
        for number in range(4):
            put(client, number, [4 * MIB])
        values = client.get([key(n) for n in range(4)], TIMEOUT_S)
        next(values)
        assert served.store.stats().leases
        del values
        wait_until(lambda: served.store.stats().leases == 0)
        assert isinstance(only(client, 3), StoredValue)
        unused = client.get([key(0)], TIMEOUT_S)
        del unused
        wait_until(lambda: served.store.stats().leases == 0)


@pytest.mark.parametrize("transport", ["shared", "socket"])
def test_a_failed_read_holds_no_lease_while_its_error_is_alive(
    served: Served, transport: str
) -> None:
    with client_of(served.address, transport) as client:
        for number in range(2):
            put(client, number, [MIB])
        keys, memory = [key(0), key(1)], iter((MIB, 1))
        values = client.get(keys, TIMEOUT_S, allocate=lambda _: memoryview(bytearray(next(memory))))
        with pytest.raises(InvalidInput, match="allocate") as kept:
            list(values)
        wait_until(lambda: served.store.stats().leases == 0)
        assert kept.tb


def connect(served: Served, transport: str) -> FramedConnection:
    """Return a bare connection that has received WELCOME."""
    if transport == "shared":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(served.transports.hello().data_socket)
    else:
        sock = socket.create_connection(("127.0.0.1", served.transports.port))
    channel = FramedConnection(sock)
    channel.deadline = time.monotonic() + TIMEOUT_S
    send_credential(channel, served.transports.hello().boot, None)
    if transport == "shared":
        _, fds, _, _ = socket.recv_fds(sock, 1, 3)
        for fd in fds:
            os.close(fd)
    assert channel.receive(MIB)[0] == FrameKind.WELCOME
    return channel


def begin_put(channel: FramedConnection, number: int) -> memoryview:
    variant, value = new(number, [4 * MIB])
    channel.send(FrameKind.PUT, to_put_header(variant, Ack.ACCEPTED))
    kind, payload = channel.receive(MIB)
    assert kind == FrameKind.GRANT
    assert pb.PutGrant.FromString(bytes(payload)).granted
    return value


@pytest.mark.parametrize("transport", ["shared", "socket"])
def test_a_client_that_dies_while_putting_leaves_nothing(served: Served, transport: str) -> None:
    channel = connect(served, transport)
    value = begin_put(channel, 1)
    if transport == "socket":
        channel.send_raw(value[: 2 * MIB])
    channel.close()
    with client_of(served.address, transport) as client:
        wait_until(lambda: not served.transports._connections or client.transport == "")
        assert only(client, 1) is Miss.NEVER_STORED
        variant, value = new(1, [4 * MIB])
        assert client.put(variant, whole(variant, value), TIMEOUT_S) is PutOutcome.STORED
    assert served.store.stats().variants == 1


@pytest.mark.parametrize("transport", ["shared", "socket"])
def test_a_slow_client_is_disconnected(
    served: Served, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(served.address, transport) as client:
        for number in range(8):
            put(client, number, [4 * MIB])
    monkeypatch.setattr("ragcache_cachestore.api.data_connection.LEASE_S", 0.3)
    writer, reader = connect(served, transport), connect(served, transport)
    begin_put(writer, 100)  # and nothing more
    reader.send(FrameKind.GET, to_get_request([key(n) for n in range(8)], exact=False, domain=""))
    if transport == "socket":  # which reads nothing of it; over shared memory leases just expire
        wait_until(lambda: served.store.stats().leases == 0)
        wait_until(lambda: not served.transports._connections)
    else:
        wait_until(lambda: len(served.transports._connections) == 1)
    assert served.store.reads.open([key(100)]) == [Miss.NEVER_STORED]
    writer.close()
    reader.close()


def reading(client: StoreClient, number: int) -> Iterator[Any]:
    """Begin to read two values. The connection stays in use until the second one is taken."""
    values = client.get([key(number), key(number)], TIMEOUT_S)
    next(values)
    return values


@pytest.mark.parametrize("transport", ["shared", "socket"])
def test_the_idlest_connection_makes_room_and_its_client_connects_again(
    served: Served,
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # A client of shared memory has a second connection, which shows that the store is alive.
    monkeypatch.setattr(data_server, "MAX_CONNECTIONS", 4 if transport == "shared" else 2)
    monkeypatch.setattr(data_server, "FULL_WAIT_S", TIMEOUT_S)  # until the leases have ended
    with contextlib.ExitStack() as ends:
        clients = [ends.enter_context(client_of(served.address, transport)) for _ in range(5)]
        variant, value = new(1, [1000])
        clients[0].put(variant, whole(variant, value), TIMEOUT_S)
        with caplog.at_level("INFO"):
            for round_ in range(3):
                for client in clients:
                    found = only(client, 1)
                    assert isinstance(found, StoredValue), round_
                    assert found.value == value
        stats = clients[0].stats()
        assert stats.connections_evicted >= 5
        assert (stats.connections <= 4, stats.connections_refused) == (True, 0)
        assert "broken" not in caplog.text, "an eviction is no failure"


def test_connections_in_use_are_not_evicted(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_server, "MAX_CONNECTIONS", 2)
    variant, value = new(1, [1000])
    with contextlib.ExitStack() as ends:
        one, other, third = (
            ends.enter_context(client_of(served.address, "socket")) for _ in range(3)
        )
        one.put(variant, whole(variant, value), TIMEOUT_S)
        values = reading(one, 1), reading(other, 1)
        with pytest.raises(Unavailable, match="too many connections") as refused:
            third.connect(TIMEOUT_S)
        assert refused.value.retry_after_s == 1.0
        assert served.store.stats().connections_refused == 1
        for reads in values:
            assert len(list(reads)) == 1
        # Their leases end some time after the values are read.
        wait_until(lambda: not served.store.stats().leases)
        monkeypatch.setattr(data_server, "FULL_WAIT_S", TIMEOUT_S)
        third.connect(TIMEOUT_S)
        assert isinstance(only(third, 1), StoredValue)


def test_a_client_that_gets_no_more_connections_waits_for_its_own(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_server, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(data_server, "FULL_WAIT_S", 0.05)  # the store refuses long before the end
    with client_of(served.address, "socket") as client, ThreadPoolExecutor(1) as pool:
        put(client, 1, [1000])
        reads = reading(client, 1)
        waiting = pool.submit(only, client, 1)
        wait_until(lambda: served.store.stats().connections_refused == 1)
        assert not waiting.done()
        with pytest.raises(Unavailable, match="too many connections") as full:
            list(client.get([key(1)], 2.0))
        assert not isinstance(full.value, NoAnswer), "the store is well"
        list(reads)
        assert isinstance(waiting.result(TIMEOUT_S), StoredValue)


@pytest.mark.parametrize("kind", [FrameKind.EVICTED, None])
def test_an_eviction_while_the_call_is_on_its_way_is_not_noticed(
    served: Served, kind: FrameKind | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client checks its connection before the call. The eviction comes after that."""
    with client_of(served.address, "socket") as client:
        value = put(client, 1, [1000])
        wait_until(lambda: not served.store.stats().leases)
        (connection,) = served.transports._connections
        send = FramedConnection.send
        calls = []

        def evict_first(self: FramedConnection, sent: FrameKind, *args: Any, **more: Any) -> None:
            if sent == FrameKind.GET:
                calls.append(self)
            # When the call is repeated, the store may still have the evicted connection.
            if sent == FrameKind.GET and len(calls) == 1:
                if kind is None:
                    connection.channel.interrupt()  # as if the store had stopped
                else:
                    wait_until(connection.try_evict)
            send(self, sent, *args, **more)

        monkeypatch.setattr(FramedConnection, "send", evict_first)
        found = only(client, 1)
        assert isinstance(found, StoredValue)
        assert found.value == value
        assert len(calls) == 2


def test_many_clients_share_few_connections(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connections of 64 engines with two clients each, against room for a quarter."""
    monkeypatch.setattr(data_server, "MAX_CONNECTIONS", 32)
    monkeypatch.setattr(data_server, "FULL_WAIT_S", TIMEOUT_S)  # until leases have ended
    variant, value = new(1, [1000])
    with contextlib.ExitStack() as ends:
        clients = [ends.enter_context(client_of(served.address, "socket")) for _ in range(128)]
        clients[0].put(variant, whole(variant, value), TIMEOUT_S)
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda client: only(client, 1), 3 * clients))
        assert all(isinstance(one, StoredValue) for one in found)
        stats = served.store.stats()
        assert stats.connections <= 32
        assert stats.connections_refused == 0


@pytest.mark.parametrize("transport", ["shared", "socket"])
def test_calls_wait_for_a_connection_within_their_deadline(
    served: Served, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framed_transport, "MAX_CONNECTIONS", 1)
    with client_of(served.address, transport) as client:
        for number in (1, 2):
            put(client, number, [MIB])
        values = client.get([key(1), key(2)], TIMEOUT_S)
        next(values)
        with pytest.raises(Unavailable, match="already"):
            list(client.get([key(2)], 0.05))
        next(values)
        assert isinstance(only(client, 1), StoredValue)


def test_a_child_process_cannot_use_its_parents_client(served: Served) -> None:
    with client_of(served.address, "shared") as client:
        client.connect(TIMEOUT_S)
        client._pid += 1  # as if forked
        with pytest.raises(Unavailable, match="parent process"):
            client.get([key(1)], TIMEOUT_S)
        client._pid -= 1


def test_a_put_that_is_refused_leaves_its_connection_to_others(served: Served) -> None:
    with client_of(served.address, "socket") as client:
        variant, value = new(1, [2 * MIB, 100])
        other, _ = new(2, [2 * MIB, 100])
        assert client.put(variant, whole(variant, value), TIMEOUT_S) is PutOutcome.STORED
        for refused in (
            replace(other, origin=Origin(domain="")),
            replace(other, part_bytes=(2 * MIB, 100 - 1)),
        ):
            with pytest.raises(InvalidInput):
                client.put(refused, whole(other, value), TIMEOUT_S)
            assert (
                client.put(variant, whole(variant, value), TIMEOUT_S) is PutOutcome.ALREADY_STORED
            )
        assert len(served.transports._connections) == 1
        found = only(client, 1)
        assert isinstance(found, StoredValue)
        assert found.value == value


def test_junk_ends_a_connection_and_nothing_else(served: Served) -> None:
    rng = np.random.default_rng(0)
    with client_of(served.address, "shared") as client:
        put(client, 1, [1000])
        for transport in ("shared", "socket"):
            for kind in (0, 1, 2, 3, 4, 5, 64, 255):
                channel = connect(served, transport)
                junk = rng.bytes(int(rng.integers(0, 300)))
                header = len(junk).to_bytes(4, "little") + bytes((kind, 0, 0, 0))
                with contextlib.suppress(ConnectionBroken):
                    channel.send_raw(header + junk)
                    channel.deadline = time.monotonic() + 0.2
                    answered, _ = channel.receive(MIB)
                    assert answered in {FrameKind.ERROR, FrameKind.GOT, FrameKind.GRANT}
                channel.close()
            channel = connect(served, transport)
            channel.send_raw(b"\xff" * 64)  # a frame of four gigabytes
            with pytest.raises(ConnectionBroken, match=r"closed|reset"):
                channel.receive(MIB)
            channel.close()
        assert isinstance(only(client, 1), StoredValue)
        wait_until(lambda: len(served.transports._connections) == 1)


@pytest.mark.parametrize("transport", ["shared", "socket"])
def test_the_error_of_a_release_is_not_the_reply_of_the_next_call(
    served: Served, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, failures = served.store.reads.release, [Unavailable("cachestore", "its disk is full")]

    def fail_once(*args: Any) -> None:
        if failures:
            raise failures.pop()
        release(*args)

    monkeypatch.setattr(served.store.reads, "release", fail_once)
    with client_of(served.address, transport) as client:
        for number in (1, 2):
            put(client, number, [1000])
        for number in (1, 2, 1, 2):
            found = only(client, number)
            assert isinstance(found, StoredValue)
            assert found.value == new(number, [1000])[1]
        wait_until(lambda: not failures)
        wait_until(lambda: served.store.stats().leases == 0)
        assert isinstance(only(client, 1), StoredValue)


def test_a_frame_may_come_in_pieces(served: Served) -> None:
    channel = connect(served, "socket")
    for byte in frame(FrameKind.GET, to_get_request([key(5)], exact=False, domain="")):
        channel.send_raw(bytes((byte,)))
    kind, payload = channel.receive(MIB)
    assert kind == FrameKind.GOT
    reply = pb.DataGetReply.FromString(bytes(payload))
    assert [found.header.miss for found in reply.values] == [pb.MISS_NEVER_STORED]
    channel.close()


@pytest.fixture
def port() -> int:
    return free_port()


@contextlib.contextmanager
def process(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a store as a process, and kill it at the end."""
    environment = os.environ | {
        "RAGCACHE_LISTEN": f"127.0.0.1:{port}",
        "RAGCACHE_DATA_DIR": str(folder / "data"),
        "RAGCACHE_MEMORY_BYTES": str(128 * MIB),
        "RAGCACHE_DISK_BYTES": str(512 * MIB),
        "RAGCACHE_DATA_LISTEN": "127.0.0.1:0",
        "RAGCACHE_DATA_SOCKET": str(folder / "transport.sock"),
        "RAGCACHE_LOG_LEVEL": "warning",
    }
    running = subprocess.Popen([sys.executable, "-m", "ragcache_cachestore"], env=environment)
    try:
        yield running
    finally:
        running.send_signal(signal.SIGCONT)
        running.kill()
        running.wait()


def wait_for(client: StoreClient) -> None:
    def connects() -> bool:
        with contextlib.suppress(Unavailable):
            client.connect()
            return True
        return False

    wait_until(connects, "a store")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_store_that_is_killed_costs_one_call_at_most(
    tmp_path: Path, port: int, transport: str
) -> None:
    with client_of(f"127.0.0.1:{port}", transport) as client:
        variant, value = new(1, [16 * MIB])
        with process(tmp_path, port) as running:
            wait_for(client)
            assert (
                client.put(variant, whole(variant, value), TIMEOUT_S, Ack.DURABLE)
                is PutOutcome.STORED
            )
            values = client.get([key(1)] * 8, TIMEOUT_S)
            next(values)
            running.kill()
            running.wait()
            started = time.monotonic()
            if transport == "shared":  # a leased value stays at its address without the store
                assert all(isinstance(found, StoredValue) for _, found in values)
            else:
                with pytest.raises(Unavailable):
                    list(values)
            with pytest.raises(Unavailable):
                list(client.get([key(1)], TIMEOUT_S))
            assert time.monotonic() - started < TIMEOUT_S, "a call waited for the store"
        with process(tmp_path, port):
            wait_for(client)
            found = only(client, 1)
            assert isinstance(found, StoredValue)
            assert found.value == value


@pytest.mark.parametrize("transport", ["shared", "socket"])
def test_a_restart_between_calls_is_not_noticed(tmp_path: Path, port: int, transport: str) -> None:
    with client_of(f"127.0.0.1:{port}", transport) as client:
        variant, value = new(1, [MIB])
        with process(tmp_path, port):
            wait_for(client)
            client.put(variant, whole(variant, value), TIMEOUT_S, Ack.DURABLE)
        with process(tmp_path, port):
            with client_of(f"127.0.0.1:{port}", transport) as other:
                wait_for(other)
            time.sleep(1.1)  # gRPC waits as long between two tries to connect
            found = only(client, 1)
            assert isinstance(found, StoredValue)
            assert found.value == value


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_frozen_store_is_unavailable_in_time(tmp_path: Path, port: int, transport: str) -> None:
    with client_of(f"127.0.0.1:{port}", transport) as client, process(tmp_path, port) as running:
        wait_for(client)
        put(client, 1, [MIB])
        big, raw = new(2, [MIB])
        running.send_signal(signal.SIGSTOP)
        os.waitpid(running.pid, os.WUNTRACED)  # until it does
        with pytest.raises(RagCacheError, match="deadline"):
            list(client.get([key(1)], 0.3))
        with pytest.raises(RagCacheError, match="deadline"):
            client.put(big, whole(big, raw), 0.3)
        with pytest.raises(RagCacheError, match="deadline"):
            client.lookup([LookupKey.for_variant(key(1))], 0.3)
        running.send_signal(signal.SIGCONT)
        assert isinstance(only(client, 1), StoredValue)


def test_a_refused_connection_ends_no_transport(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served_by = data_connection.DataConnection.start
    failed = threading.Event()

    def start(self: Any) -> None:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("no more threads")
        served_by(self)

    monkeypatch.setattr(data_connection.DataConnection, "start", start)
    with client_of(served.address, "socket") as client, contextlib.suppress(Unavailable):
        client.connect()
    assert failed.is_set()
    with client_of(served.address, "socket") as client:
        client.connect(TIMEOUT_S)
        assert client.transport == "socket"


def test_a_refusing_transport_is_skipped_and_used_later(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_client, "FASTER_TRANSPORT_EVERY_S", 0.0)
    monkeypatch.setattr(store_client, "FASTER_TRANSPORT_TIMEOUT_S", TIMEOUT_S)
    most = data_server.MAX_CONNECTIONS
    monkeypatch.setattr(data_server, "MAX_CONNECTIONS", 0)
    with contextlib.closing(StoreClient(served.address)) as client:
        client.connect(TIMEOUT_S)
        assert client.transport == "grpc"
        variant, value = new(1, [1000])
        assert client.put(variant, whole(variant, value), TIMEOUT_S) is PutOutcome.STORED
        assert client.transport == "grpc"
        monkeypatch.setattr(data_server, "MAX_CONNECTIONS", most)
        found = only(client, 1)
        assert isinstance(found, StoredValue)
        assert found.value == value
        assert client.transport == "shared"


@pytest.mark.parametrize("transport", ["shared", "socket"])
def test_an_expired_lease_is_no_hit(
    served: Served, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    monkeypatch.setattr(served.store.reads, "is_leased", lambda _: False)
    with client_of(served.address, transport) as client:
        put(client, 1, [1000])
        only(client, 1)
        wait_until(lambda: served.store.stats().misses_by_reason.get("timed_out") == 1)
    assert served.store.stats().hits_memory == 0


def test_a_client_with_too_many_calls_does_not_doubt_its_store(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framed_transport, "MAX_CONNECTIONS", 1)
    with client_of(served.address, "socket") as client:
        put(client, 1, [1000])
        reading = client.get([key(1)], TIMEOUT_S)
        with pytest.raises(Unavailable) as full:
            client.get([key(1)], 0.05)
        assert not isinstance(full.value, NoAnswer)
        list(reading)


def test_a_path_that_is_in_use_is_left_alone(tmp_path: Path) -> None:
    store = Store(tmp_path / "data", StoreOptions(MIB, MIB))
    with contextlib.closing(store):
        path = tmp_path / "transport.sock"
        path.write_text("precious")
        with pytest.raises(InvalidInput, match="RAGCACHE_DATA_SOCKET"):
            DataServer(store, path, None)
        assert path.read_text() == "precious"
        path.unlink()
        first = DataServer(store, path, None)
        with pytest.raises(InvalidInput, match="RAGCACHE_DATA_SOCKET"):
            DataServer(store, path, None)
        path.unlink()
        second = DataServer(store, path, None)
        first.close()
        assert path.exists(), "it is another's by now"
        second.close()
        assert not path.exists()
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(path))
        DataServer(store, path, None).close()


# What was read once is read again without asking


@contextlib.contextmanager
def remembering(served: Served, numbers: list[int], size: int = MIB) -> Iterator[StoreClient]:
    """A client with shared memory that has read values and sent its deferred messages."""
    with client_of(served.address, "shared") as client:
        for number in numbers:
            put(client, number, [size // 2, size // 2])
            assert isinstance(only(client, number), StoredValue)
        wait_until(lambda: served.store.stats().leases == 0)
        sent = 2 * size * len(numbers)  # counted a moment after the lease's end
        wait_until(lambda: served.store.stats().bytes_by_transport.get("shared", 0) >= sent)
        yield client


def asked(client: StoreClient, monkeypatch: pytest.MonkeyPatch) -> list[FrameKind]:
    """Return a list that gets the kinds of requests which client sends from now on.

    The client asks a store that has reported nothing for SILENT_S. A busy machine is no such store.
    """
    monkeypatch.setattr(liveness, "SILENT_S", TIMEOUT_S)
    kinds: list[FrameKind] = []
    ask = framed_transport.FramedTransport.call

    def listen(transport: Any, kind: FrameKind, *rest: Any) -> Any:
        kinds.append(kind)
        return ask(transport, kind, *rest)

    monkeypatch.setattr(framed_transport.FramedTransport, "call", listen)
    return kinds


def test_a_value_is_read_again_without_a_request_and_the_read_is_reported(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with remembering(served, [1, 2]) as client:
        before = served.store.stats()
        kinds = asked(client, monkeypatch)
        own = bytearray(MIB + 5)
        for _ in range(3):
            found = only(client, 1, allocate=lambda _: memoryview(own))
            assert isinstance(found, StoredValue)
            assert found.value == own[:MIB] == new(1, [MIB // 2, MIB // 2])[1]
            assert (found.tier, found.value_format) == (Tier.MEMORY, 7)
        assert kinds == []
        wanted = before.hits_memory + 3
        wait_until(lambda: served.store.stats().hits_memory == wanted)
        sent = (
            served.store.stats().bytes_by_transport["shared"] - before.bytes_by_transport["shared"]
        )
        assert sent == 3 * MIB


def test_cached_and_uncached_values_arrive_in_order(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with remembering(served, [1, 3]) as client:
        for number in (2, 4):
            put(client, number, [MIB])
        kinds = asked(client, monkeypatch)
        keys = [key(number) for number in (5, 1, 2, 3, 4)]
        found = dict(client.get(keys, TIMEOUT_S))
        assert list(found) == keys
        assert found.pop(key(5)) is Miss.NEVER_STORED
        for one in found.values():
            assert isinstance(one, StoredValue)
            assert checksummed_parts(one.value, [part.num_bytes for part in one.parts]) == one.parts
        assert kinds == [FrameKind.GET]


def test_a_deleted_value_is_not_read_again(served: Served) -> None:
    with remembering(served, [1, 2]) as client, client_of(served.address, "grpc") as other:
        other.delete(Deletion(os.urandom(16), chunks=(key(1).chunk,)))
        assert only(client, 1) is Miss.DELETED
        assert isinstance(only(client, 2), StoredValue)


def read_until(
    client: StoreClient, number: int, gone: threading.Event, found_after: list[StoredValue | Miss]
) -> None:
    """Read a value repeatedly; found_after gets the result of the read that began after gone."""
    while not found_after:
        began_after = gone.is_set()
        found = only(client, number)
        if began_after:
            found_after.append(found)


def test_no_read_returns_a_deleted_value(served: Served) -> None:
    """At any time of a delete, a read that starts after its acknowledgement is a miss."""
    with remembering(served, []) as client, client_of(served.address, "grpc") as other:
        for number in range(60):
            put(client, number, [200_000])
            assert isinstance(only(client, number), StoredValue)
            gone = threading.Event()
            found_after: list[StoredValue | Miss] = []
            reader = threading.Thread(target=read_until, args=[client, number, gone, found_after])
            reader.start()
            time.sleep(0.001 * (number % 5))
            other.delete(Deletion(os.urandom(16), chunks=(key(number).chunk,)))
            gone.set()
            reader.join()
            assert found_after == [Miss.DELETED]


def test_after_a_delete_the_other_values_are_requested_at_once(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with remembering(served, [1, 2, 3, 4]) as client:
        client.delete(Deletion(os.urandom(16), chunks=(key(9).chunk,)))
        kinds = asked(client, monkeypatch)
        for _ in range(2):
            found = list(client.get([key(number) for number in (1, 2, 3, 4)], TIMEOUT_S))
            assert all(isinstance(one, StoredValue) for _, one in found)
        assert kinds == [FrameKind.GET]


def test_a_better_value_replaces_the_cached_one(served: Served) -> None:
    with client_of(served.address, "shared") as client:
        poor, value = new(1, [MIB], exact=False)
        client.put(poor, whole(poor, value), TIMEOUT_S)
        assert isinstance(only(client, 1), StoredValue)
        better = memoryview(np.random.default_rng(9).bytes(MIB))
        info = replace(poor.info, provenance=Provenance(exact=True))
        rich = replace(poor, info=info, part_bytes=(MIB,))
        client.put(rich, whole(rich, better), TIMEOUT_S)
        found = only(client, 1)
        assert isinstance(found, StoredValue)
        assert found.info.provenance.exact
        assert found.value == better


def test_reused_memory_is_noticed(serve: Serve) -> None:
    served = serve(memory_bytes=8 * MIB, disk_bytes=MIB, policy="lru")  # the disk holds none
    with remembering(served, [1, 2], size=2 * MIB) as client:
        for number in range(10, 20):
            put(client, number, [2 * MIB])
        rooms: list[VariantInfo] = []

        def allocate(info: VariantInfo) -> memoryview:
            rooms.append(info)
            return memoryview(bytearray(info.num_bytes))

        assert only(client, 1, allocate=allocate) is Miss.EVICTED
        assert len(rooms) <= 1  # asking in its stead takes no other
        found = only(client, 19)
        assert isinstance(found, StoredValue)
        assert found.value == new(19, [2 * MIB])[1]
        assert served.store.stats().corrupt == 0


def test_a_cached_value_that_became_corrupt_is_a_miss(serve: Serve) -> None:
    served = serve(disk_bytes=0)
    with remembering(served, [1]) as client:
        [lease] = served.store.reads.open([key(1)])
        assert not isinstance(lease, Miss)
        served.store.memory_tier.views(lease.copy.extents)[-1][-1] ^= 1
        served.store.reads.release([lease.id])
        assert only(client, 1) is Miss.CORRUPT
        wait_until(lambda: served.store.stats().corrupt == 1)


def test_a_cached_value_of_one_domain_is_not_served_to_another(served: Served) -> None:
    with remembering(served, [1]) as client:
        assert isinstance(only(client, 1, domain="public"), StoredValue)
        assert only(client, 1, domain="secret") is Miss.OTHER_DOMAIN
        assert isinstance(only(client, 1, exact=True), StoredValue)


def test_the_memory_of_a_stopped_store_is_not_served(tmp_path: Path, port: int) -> None:
    with client_of(f"127.0.0.1:{port}", "shared") as client:
        with process(tmp_path, port):
            wait_for(client)
            put(client, 1, [MIB], ack=Ack.DURABLE)
            assert isinstance(only(client, 1), StoredValue)
            assert isinstance(only(client, 1), StoredValue)
        with pytest.raises(Unavailable):
            only(client, 1)
        with process(tmp_path, port):
            with client_of(f"127.0.0.1:{port}", "grpc") as other:
                wait_for(other)
                other.delete(Deletion(os.urandom(16), chunks=(key(1).chunk,)))
            wait_for(client)
            assert only(client, 1) is Miss.DELETED


def test_clients_cannot_write_to_the_status_page(served: Served) -> None:
    fd = served.store.status_page.reader_fd
    with pytest.raises(PermissionError):
        mmap.mmap(fd, mmap.PAGESIZE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, bytes(8), 0)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(again, bytes(8), 0)
    os.close(again)


def test_reported_reads_are_bounded(served: Served) -> None:
    with remembering(served, [1], size=1000) as client:
        before = served.store.stats().hits_memory
        channel = connect(served, "shared")
        read = pb.ReadReport.Read(key=to_key(key(1)), times=1 << 31, seconds=1)
        unknown = pb.ReadReport.Read(key=to_key(key(2)), times=1, seconds=1)
        never = pb.ReadReport.Read(key=to_key(key(1)), times=0)
        channel.send(FrameKind.READS, pb.ReadReport(reads=[read, unknown, never]))
        wanted = before + data_connection.MAX_REREADS
        wait_until(lambda: served.store.stats().hits_memory == wanted)
        channel.close()
        assert isinstance(only(client, 1), StoredValue)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_uses_without_a_read_are_reported_over_any_transport(
    served: Served, transport: str
) -> None:
    with client_of(served.address, transport) as client:
        put(client, 1, [1000])
        before = served.store.stats()
        reports = [ReportedUses(key(1), times=2), ReportedUses(key(2), VariantUse(0.5))]
        assert client.report_uses(reports) == 2
        assert client.report_uses([ReportedUses(key(1), times=1 << 30)]) == MAX_REPORTED_TIMES
        after = served.store.stats()
        assert after.hits_memory == before.hits_memory
        assert after.bytes_by_transport == before.bytes_by_transport
        assert isinstance(only(client, 1), StoredValue)


def test_gets_of_old_and_new_values_do_not_wait_for_each_other(served: Served) -> None:
    many = 2 * framed_transport.MAX_CONNECTIONS
    with remembering(served, [0]) as client:
        for number in range(1, many + 1):
            put(client, number, [1000])
        begun = threading.Barrier(framed_transport.MAX_CONNECTIONS)
        found: list[StoredValue | Miss] = []

        def get(number: int) -> None:
            values = client.get([key(number), key(0)], TIMEOUT_S / 2)
            begun.wait(TIMEOUT_S)  # each has asked for one value, and knows where the other is
            found.extend([one for _, one in values])

        threads = [
            threading.Thread(target=get, args=[n + 1])
            for n in range(framed_transport.MAX_CONNECTIONS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 2 * len(threads)
        assert all(isinstance(one, StoredValue) for one in found)


def test_an_idle_liveness_connection_is_replaced(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with remembering(served, [1]) as client:
        assert isinstance(only(client, 1), StoredValue)
        served.interrupt()
        wait_until(lambda: not served.transports._connections)
        kinds = asked(client, monkeypatch)
        assert isinstance(only(client, 1), StoredValue)
        assert kinds == []


def test_the_memory_of_a_frozen_store_is_not_served(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(f"127.0.0.1:{port}", "shared") as client, process(tmp_path, port) as running:
        wait_for(client)
        put(client, 1, [MIB])
        assert isinstance(only(client, 1), StoredValue)
        running.send_signal(signal.SIGSTOP)
        os.waitpid(running.pid, os.WUNTRACED)  # until it does
        monkeypatch.setattr(liveness, "SILENT_S", SILENT_S)
        time.sleep(SILENT_S + 0.1)
        with pytest.raises(Unavailable):
            list(client.get([key(1)], 0.5))
        running.send_signal(signal.SIGCONT)
        wait_for(client)
        assert isinstance(only(client, 1), StoredValue)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e30])
def test_no_reported_read_time_distorts_predictions(served: Served, seconds: float) -> None:
    with remembering(served, [1]) as client:
        before = served.store.stats().hits_memory
        channel = connect(served, "shared")
        read = pb.ReadReport.Read(key=to_key(key(1)), times=2, seconds=seconds)
        channel.send(FrameKind.READS, pb.ReadReport(reads=[read]))
        wait_until(lambda: served.store.stats().hits_memory == before + 2)
        channel.close()
        [variants] = client.lookup([LookupKey(key(1).chunk, key(1).prefix)]).variants
        assert 0 <= variants.stored[0].load_s < TIMEOUT_S


def test_reads_cannot_be_reported_over_a_network(served: Served) -> None:
    with remembering(served, [1]):
        channel = connect(served, "socket")
        read = pb.ReadReport.Read(key=to_key(key(1)), times=1, seconds=0.1)
        channel.send(FrameKind.READS, pb.ReadReport(reads=[read]))
        with pytest.raises(ConnectionBroken, match="closed"):
            channel.receive(1000)
        channel.close()


def test_without_a_liveness_connection_the_store_is_asked(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with remembering(served, [1, 2]) as client:
        monkeypatch.setattr(data_server, "MAX_CONNECTIONS", 1)
        monkeypatch.setattr(data_connection.DataConnection, "try_evict", lambda _: False)
        kinds = asked(client, monkeypatch)
        found = [one for _, one in client.get([key(1), key(2)], TIMEOUT_S)]
        assert all(isinstance(one, StoredValue) for one in found)
        assert kinds == [FrameKind.GET, FrameKind.GET]


def test_a_store_that_stops_during_a_read_report_is_gone(tmp_path: Path, port: int) -> None:
    with client_of(f"127.0.0.1:{port}", "shared") as client, process(tmp_path, port) as running:
        wait_for(client)
        put(client, 1, [1000])
        for _ in range(3):
            assert isinstance(only(client, 1), StoredValue)
        running.kill()
        running.wait()
        time.sleep(2 * framed_transport.DEFERRED_SEND_S)  # meanwhile the reports of reads fail
        with pytest.raises(Unavailable):
            only(client, 1)


def test_strangers_make_way_for_clients(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection without a proof is ended before one that a client will use again."""
    monkeypatch.setattr(data_server, "MAX_CONNECTIONS", 3)
    with client_of(served.address, "socket") as client:
        put(client, 1, [MIB])
        strangers = [
            socket.create_connection(("127.0.0.1", served.transports.port)) for _ in range(2)
        ]
        time.sleep(2 * data_server.PROOF_WAIT_S)
        with client_of(served.address, "socket") as other:
            assert isinstance(only(other, 1), StoredValue)
            assert served.store.stats().connections_evicted >= 1
            assert served.store.stats().connections_refused == 0
        for stranger in strangers:
            stranger.close()
        assert isinstance(only(client, 1), StoredValue)


def test_more_keys_than_a_call_takes_are_several_calls(served: Served) -> None:
    with client_of(served.address, "socket") as client:
        put(client, 1, [1000])
        numbers = [*range(2, MAX_KEYS + 9), 1]
        wants = [LookupKey(key(number).chunk, key(number).prefix) for number in numbers]
        answer = client.lookup(wants)
        assert len(answer.variants) == len(numbers)
        assert [bool(one.stored) for one in answer.variants].count(True) == 1
        assert answer.variants[-1].stored
        keys = [key(number) for number in numbers]
        assert client.prefetch(keys) == 0, "it is in memory"
        uses = [ReportedUses(one) for one in keys]
        assert client.report_uses(uses) == 1
