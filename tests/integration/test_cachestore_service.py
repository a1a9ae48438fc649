"""The cache store through its real gRPC interface, in process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rocksdict import Options, Rdict

from ragcache_cachestore.disk import Disk
from ragcache_cachestore.pieces import checksum
from ragcache_cachestore.service import MAX_KEYS, MAX_TOKENS, SERVICE
from ragcache_cachestore.store import MAX_VALUE_BYTES
from ragcache_core.errors import InvalidInput, TooLarge
from ragcache_wire.cachestore_client import AsyncCacheStoreClient, to_key_message
from ragcache_wire.status import from_rpc_error
from ragcache_wire.v1 import cachestore_pb2 as pb
from tests.cachestore_parts import (
    MIB,
    TIMEOUT_S,
    Served,
    entry,
    get_value,
    info,
    key,
    pieces_of,
    put_value,
    serving,
    value,
)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as served:
        yield served


def header(raw: bytes, number: int = 1, **changes: object) -> pb.PutPart:
    """The first message of a put."""
    fields: dict[str, object] = {
        "num_tokens": 256,
        "num_bytes": len(raw),
        "exact": True,
        "checksum": checksum([raw]),
        "format": 1,
    }
    about = pb.VariantInfo(**(fields | changes))  # type: ignore[arg-type]
    return pb.PutPart(header=pb.PutHeader(key=to_key_message(key(number)), info=about))


def eventually(claim: Callable[[], bool]) -> None:
    """Wait until claim holds."""
    give_up = time.monotonic() + TIMEOUT_S
    while not claim():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def refusal(served: Served, *parts: pb.PutPart) -> InvalidInput:
    """What a put of parts is refused with."""
    with pytest.raises(grpc.RpcError) as refused:
        served.stub.Put(iter(parts), timeout=TIMEOUT_S)
    error = from_rpc_error("cachestore", refused.value)
    assert isinstance(error, InvalidInput)
    return error


@pytest.mark.parametrize("num_bytes", [1, 1000, MIB, MIB + 1, 5 * MIB + 17])
def test_a_value_goes_in_and_comes_out(served: Served, num_bytes: int) -> None:
    raw = value(num_bytes)
    assert put_value(served.client, key(1), raw)
    assert not put_value(served.client, key(1), raw)
    ((asked, found),) = served.client.get([key(1)], TIMEOUT_S)
    assert asked == key(1)
    assert found is not None
    assert found.value == raw
    assert (found.info, found.checksum, found.value_format) == (
        info(num_bytes),
        checksum([raw]),
        1,
    )


def test_many_values_come_in_the_order_asked_with_misses_between(served: Served) -> None:
    for number in range(0, 20, 2):
        put_value(served.client, key(number), value(100_000 + number))
    asked = [key(number) for number in [*range(19, -1, -1), 4, 4]]
    got = list(served.client.get(asked, TIMEOUT_S))
    assert [variant for variant, _ in got] == asked
    for variant, found in got:
        number = int.from_bytes(variant.chunk)
        expected = None if number % 2 else value(100_000 + number)
        assert (None if found is None else found.value) == expected


def test_getting_nothing_gives_nothing(served: Served) -> None:
    assert list(served.client.get([], TIMEOUT_S)) == []


def test_a_lookup_tells_what_is_stored_and_where(served: Served) -> None:
    put_value(served.client, key(1), value(10))
    assert served.client.lookup([key(0), key(1)]) == {key(1): info(10)}
    reply = served.stub.Lookup(
        pb.LookupRequest(keys=[to_key_message(key(n)) for n in (0, 1)]), timeout=TIMEOUT_S
    )
    assert [(e.found, e.tier) for e in reply.entries] == [(False, ""), (True, "memory")]


def test_as_many_keys_as_allowed_are_answered(served: Served) -> None:
    put_value(served.client, key(MAX_KEYS - 1), b"x")
    keys = [key(number) for number in range(MAX_KEYS)]
    assert list(served.client.lookup(keys, TIMEOUT_S)) == [key(MAX_KEYS - 1)]
    assert [k for k, found in served.client.get(keys, TIMEOUT_S) if found] == [key(MAX_KEYS - 1)]


def test_more_keys_are_refused(served: Served) -> None:
    keys = [key(number) for number in range(MAX_KEYS + 1)]
    with pytest.raises(TooLarge, match="keys"):
        served.client.lookup(keys, TIMEOUT_S)
    with pytest.raises(TooLarge, match="keys"):
        list(served.client.get(keys, TIMEOUT_S))


async def test_a_delete_by_chunk_takes_every_variant(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        for prefix in range(3):
            put_value(served.client, key(1, prefix), value(10))
        put_value(served.client, key(2), value(10))
        client = AsyncCacheStoreClient(served.address)
        assert await client.delete_chunks([key(1).chunk]) == 3
        assert (await client.stats()).variants == 1
        await client.close()
        assert get_value(served.client, key(1)) is None
        assert get_value(served.client, key(2)) == value(10)


def test_a_delete_by_variant_leaves_the_chunks_others(served: Served) -> None:
    for prefix in range(2):
        put_value(served.client, key(1, prefix), value(10))
    request = pb.DeleteRequest(variants=[to_key_message(key(1, 0))])
    assert served.stub.Delete(request, timeout=TIMEOUT_S).removed == 1
    assert served.client.lookup([key(1, 0), key(1, 1)]).keys() == {key(1, 1)}


def test_a_value_that_rotted_on_disk_is_a_miss_and_is_dropped(tmp_path: Path) -> None:
    raw = value(3 * MIB)
    rotten = bytearray(raw)
    rotten[2 * MIB] ^= 1
    disk = Disk(tmp_path)
    disk.write(key(1), entry(raw, slot=1), pieces_of(bytes(rotten)))
    disk.write(key(2), entry(raw, slot=2), pieces_of(raw))
    disk.close()
    with serving(tmp_path) as served:
        request = pb.GetRequest(keys=[to_key_message(key(n)) for n in (1, 2, 1)])
        headers = [
            part.header
            for part in served.stub.Get(request, timeout=TIMEOUT_S)
            if part.WhichOneof("part") == "header"
        ]
        assert [(h.index, h.miss) for h in headers] == [
            (0, pb.MISS_CORRUPT),
            (1, pb.MISS_UNSPECIFIED),
            (2, pb.MISS_NEVER_STORED),
        ]
        assert served.client.stats().corrupt == 1
        assert put_value(served.client, key(1), raw)
        assert get_value(served.client, key(1)) == raw


def test_bytes_flipped_in_rocksdb_itself_are_detected(tmp_path: Path) -> None:
    raw = value(MIB + 5)
    with serving(tmp_path) as served:
        put_value(served.client, key(1), raw)
    families = Rdict.list_cf(str(tmp_path / "rocksdb"))
    database = Rdict(
        str(tmp_path / "rocksdb"),
        Options(raw_mode=True),
        {name: Options(raw_mode=True) for name in families},
    )
    values = database.get_column_family("values")
    ((first, piece), *_) = values.items()
    values[first] = bytes([piece[0] ^ 255]) + piece[1:]
    values.close()
    database.close()
    with serving(tmp_path) as served:
        assert served.client.lookup([key(1)]) == {key(1): info(len(raw))}
        assert get_value(served.client, key(1)) is None
        assert served.client.lookup([key(1)]) == {}


def test_a_restart_keeps_what_was_stored(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        for number in range(10):
            put_value(served.client, key(number), value(100_000, number))
    with serving(tmp_path) as served:
        stats = served.client.stats()
        assert (stats.variants, stats.disk_bytes, stats.memory_bytes) == (10, 1_000_000, 0)
        for number in range(10):
            assert get_value(served.client, key(number)) == value(100_000, number)


def test_memory_stays_bounded_while_everything_is_served(tmp_path: Path) -> None:
    with serving(tmp_path, memory_bytes=3 * MIB) as served:
        for number in range(8):
            put_value(served.client, key(number), value(MIB, number))
        for number in range(8):
            assert get_value(served.client, key(number)) == value(MIB, number)
            assert served.client.stats().memory_bytes <= 3 * MIB
        assert served.client.stats().hits_disk == 8


def test_a_client_that_vanishes_during_a_put_leaves_nothing(served: Served) -> None:
    raw = value(3 * MIB)
    sent = threading.Event()
    never = threading.Event()

    def parts() -> Iterator[pb.PutPart]:
        yield header(raw)
        yield pb.PutPart(data=raw[:MIB])
        sent.set()
        never.wait(TIMEOUT_S)

    call = served.stub.Put.future(parts(), timeout=TIMEOUT_S)
    assert sent.wait(TIMEOUT_S)
    call.cancel()
    never.set()
    eventually(lambda: served.store.puts.used_bytes == 0)
    assert served.client.lookup([key(1)]) == {}
    assert put_value(served.client, key(1), raw)


def test_a_client_that_stops_reading_frees_what_was_held_for_it(served: Served) -> None:
    for number in range(4):
        put_value(served.client, key(number), value(4 * MIB, number))
    request = pb.GetRequest(keys=[to_key_message(key(number)) for number in range(4)])
    call = served.stub.Get(request, timeout=TIMEOUT_S)
    next(call)
    assert served.service.gets.used_bytes > 0
    call.cancel()
    eventually(lambda: served.service.gets.used_bytes == 0)
    assert get_value(served.client, key(3)) == value(4 * MIB, 3)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_tokens": 0}, "header.info.num_tokens"),
        ({"num_tokens": MAX_TOKENS + 1}, "header.info.num_tokens"),
        ({"num_bytes": 0}, "header.info.num_bytes"),
        ({"num_bytes": MAX_VALUE_BYTES + 1}, "header.info.num_bytes"),
        ({"num_bytes": MAX_VALUE_BYTES}, "header.info.num_bytes"),  # the store holds less
        ({"num_bytes": 2}, "data"),
        ({"num_bytes": 4}, "data"),
        ({"checksum": 1}, "header.info.checksum"),
    ],
)
def test_a_put_that_does_not_add_up_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], field: str
) -> None:
    with serving(tmp_path, disk_bytes=MIB) as served:
        error = refusal(served, header(b"abc", **changes), pb.PutPart(data=b"abc"))
        assert error.field == field
        assert served.client.stats().variants == 0


def test_messages_out_of_order_are_refused(served: Served) -> None:
    data = pb.PutPart(data=b"abc")
    assert refusal(served).field == "header"
    assert refusal(served, data).field == "header"
    assert refusal(served, header(b"abc"), header(b"abc")).field == "header"


def test_keys_of_another_length_are_refused(served: Served) -> None:
    bad = pb.VariantKey(chunk=b"short", prefix=bytes(16))
    with pytest.raises(grpc.RpcError) as refused:
        served.stub.Lookup(pb.LookupRequest(keys=[bad]), timeout=TIMEOUT_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "keys[0].chunk" in str(refused.value.details())


def test_calls_that_carry_values_need_a_deadline(served: Served) -> None:
    with pytest.raises(grpc.RpcError, match="deadline"):
        served.stub.Put(iter([header(b"abc")]))
    with pytest.raises(grpc.RpcError, match="deadline"):
        list(served.stub.Get(pb.GetRequest()))


def test_health_says_serving(served: Served) -> None:
    with grpc.insecure_channel(served.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
