"""The cache store through its gRPC service, in process."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ragcache_cachestore.api import grpc_service
from ragcache_cachestore.api.grpc_service import (
    CONTROL_THREADS,
    INLINE_KEYS,
    SERVICE,
    SLOW_THREADS,
)
from ragcache_cachestore.state.leases import ReadLease
from ragcache_core.errors import InvalidInput, TooLarge, Unavailable
from ragcache_core.identity.variant import Miss, Origin, Tier
from ragcache_core.store_api import (
    MAX_KEYS,
    MAX_NAME_CHARS,
    MAX_PARTS,
    MAX_TOKENS,
    Ack,
    Deletion,
    LookupKey,
    PutOutcome,
    ReportedUses,
)
from ragcache_kv.values.conversions import (
    to_deletion,
    to_key,
    to_lookup_request,
    to_put_header,
)
from ragcache_wire.status import from_rpc_error
from ragcache_wire.v1 import cachestore_pb2 as pb
from tests.kit.store import (
    MIB,
    TIMEOUT_S,
    ServedStore,
    checksum,
    checksummed_parts,
    get_value,
    info,
    key,
    put_value,
    serving,
    value,
    variant,
)
from tests.kit.wait import wait_until

TRANSPORTS = (("grpc",), ("socket",), ("shared",))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedStore]:
    with serving(tmp_path) as served:
        yield served


def header(raw: bytes, number: int = 1, **changes: Any) -> pb.PutPart:
    """The first message of a put, with changed fields of the header's info."""
    message = to_put_header(variant(key(number), raw), Ack.ACCEPTED)
    for name, changed in changes.items():
        setattr(message.info, name, changed)
    return pb.PutPart(header=message)


def refusal(call: Callable[[], object]) -> InvalidInput:
    """Return the error of a call."""
    with pytest.raises(grpc.RpcError) as refused:
        call()
    error = from_rpc_error("cachestore", refused.value)
    assert isinstance(error, InvalidInput)
    return error


def put_refusal(served: ServedStore, *parts: pb.PutPart) -> InvalidInput:
    """Return the error of a put."""
    return refusal(lambda: served.stub.Put(iter(parts), timeout=TIMEOUT_S))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_bytes", [1, 1000, MIB, 5 * MIB + 17])
def test_a_value_that_was_put_is_returned(
    tmp_path: Path, transport: tuple[str, ...], num_bytes: int
) -> None:
    with serving(tmp_path, transports=transport[:1] if transport != ("grpc",) else ()) as served:
        raw = value(num_bytes)
        assert put_value(served.client, key(1), raw, num_parts=3) is PutOutcome.STORED
        assert put_value(served.client, key(1), raw) is PutOutcome.ALREADY_STORED
        assert served.client.transport == transport[0]
        ((asked, found),) = served.client.get([key(1)], TIMEOUT_S)
        assert asked == key(1)
        assert not isinstance(found, Miss)
        assert found.value == raw
        assert (found.info, found.parts, found.value_format, found.tier) == (
            info(num_bytes),
            checksummed_parts(raw, 3),
            1,
            Tier.MEMORY,
        )
        wait_until(
            lambda: served.store.stats().bytes_by_transport.get(transport[0]) == 2 * num_bytes
        )


def test_answers_have_the_order_of_the_request(served: ServedStore) -> None:
    for number in range(0, 20, 2):
        put_value(served.client, key(number), value(100_000 + number))
    asked = [key(number) for number in [*range(19, -1, -1), 4, 4]]
    got = list(served.client.get(asked, TIMEOUT_S))
    assert [variant for variant, _ in got] == asked
    for one, found in got:
        number = int.from_bytes(one.chunk)
        expected = Miss.NEVER_STORED if number % 2 else value(100_000 + number)
        assert (found if isinstance(found, Miss) else found.value) == expected


def test_a_lookup_tells_the_stored_variants_and_their_tier(served: ServedStore) -> None:
    put_value(served.client, key(1), value(10), origin=Origin(prefix_chunks=(key(7).chunk,)))
    answer = served.client.lookup(
        [LookupKey.for_variant(key(0)), LookupKey.for_variant(key(1)), LookupKey(key(1).chunk)]
    )
    missing, one, every = answer.variants
    assert (missing.stored, missing.miss) == ((), Miss.NEVER_STORED)
    assert (one.stored[0].info, one.stored[0].tier) == (info(10), Tier.MEMORY)
    assert every.stored[0].prefix_chunks == (key(7).chunk,)
    assert answer.as_of.store == served.store.store_id


def test_the_largest_number_of_keys_is_answered(served: ServedStore) -> None:
    put_value(served.client, key(MAX_KEYS - 1), b"x")
    keys = [key(number) for number in range(MAX_KEYS)]
    answers = served.client.lookup([LookupKey.for_variant(one) for one in keys], TIMEOUT_S).variants
    assert [bool(answer.stored) for answer in answers] == [False] * (MAX_KEYS - 1) + [True]
    found = [one for one, got in served.client.get(keys, TIMEOUT_S) if not isinstance(got, Miss)]
    assert found == [key(MAX_KEYS - 1)]


def test_more_keys_are_refused(served: ServedStore) -> None:
    """A client divides lookups, which several ranks make larger, and no reads."""
    keys = [key(number) for number in range(MAX_KEYS + 1)]
    wants = [LookupKey.for_variant(one) for one in keys]
    request = to_lookup_request(wants, exact=False, domain="")
    with pytest.raises(grpc.RpcError, match="keys"):
        served.client._stub.Lookup(request)
    with pytest.raises(TooLarge, match="keys"):
        list(served.client.get(keys, TIMEOUT_S))


def test_deletes_and_their_tombstones(served: ServedStore) -> None:
    for prefix in range(3):
        put_value(served.client, key(1, prefix), value(10))
    put_value(served.client, key(2), value(10))
    planned = served.client.lookup([]).as_of
    deletion = Deletion(id=os.urandom(16), chunks=(key(1).chunk,))
    assert served.client.delete(deletion) == 3
    assert served.client.delete(deletion) == 0
    assert [get_value(served.client, key(n)) for n in (1, 2)] == [None, value(10)]
    ((_, found),) = served.client.get([key(1)], TIMEOUT_S)
    assert found is Miss.DELETED
    outcome = put_value(served.client, key(1), value(10), as_of=planned)
    assert outcome is PutOutcome.DELETED
    batch, end = served.client.tombstones({})
    assert [(one.id, one.chunks) for one in batch.deletions] == [(deletion.id, deletion.chunks)]
    assert end == replace(batch, deletions=())
    assert (batch.store, batch.sequence, batch.incomplete) == (served.store.store_id, 1, False)
    assert list(served.client.tombstones({batch.store: 1, bytes(16): 9})) == [end]


def test_prefetches_are_counted(served: ServedStore) -> None:
    put_value(served.client, key(1), value(10))
    assert served.client.prefetch([key(1)]) == 0


def test_a_client_holds_what_its_waiting_requests_need(served: ServedStore) -> None:
    put_value(served.client, key(1), value(10))
    served.client.prefetch([key(1), key(2)], hold_s=10.0)
    with served.store.state.lock:
        assert key(1) in served.store.state.holds
        assert len(served.store.state.holds) == 1


def test_hello_tells_the_ids_of_the_store(tmp_path: Path) -> None:
    with serving(tmp_path, transports=("shared", "socket")) as served:
        reply = served.stub.Hello(pb.HelloRequest(), timeout=TIMEOUT_S)
        assert reply.boot == served.store.boot
        assert reply.store == served.store.store_id
        assert reply.max_value_bytes == served.store.puts.max_value_bytes
        assert reply.data_port > 0
        assert os.path.exists(reply.data_socket)


def test_a_single_shard_has_no_copies(served: ServedStore) -> None:
    put_value(served.client, key(1), value(10))
    assert not served.client.drop_copy(key(1))
    assert served.client.find_misses([key(1)], TIMEOUT_S) == [None]


def test_a_use_report_does_not_wait_for_long_calls(served: ServedStore) -> None:
    put_value(served.client, key(1), value(10))
    with served.store.state.delete_lock:  # as while a delete is written to a hung disk
        pulls = [served.stub.Tombstones(pb.TombstonesRequest()) for _ in range(2 * SLOW_THREADS)]
        wait_until(lambda: served.service._busy == len(pulls))
        assert served.client.report_uses([ReportedUses(key(1))], TIMEOUT_S) == 1
        assert served.client.find_misses([key(1)], TIMEOUT_S) == [None]
    assert all(list(pull) for pull in pulls)


def test_a_lookup_does_not_wait_for_deletes(served: ServedStore) -> None:
    put_value(served.client, key(1), value(10))
    wants = [LookupKey.for_variant(key(number)) for number in range(1, INLINE_KEYS + 2)]
    with served.store.state.delete_lock:  # as while another delete is applied
        deletes = [
            served.stub.Delete.future(
                pb.DeleteRequest(deletion=to_deletion(Deletion(os.urandom(16), (key(2).chunk,)))),
                timeout=TIMEOUT_S,
            )
            for _ in range(2 * CONTROL_THREADS)
        ]
        wait_until(lambda: served.service._busy == len(deletes))
        found = served.client.lookup(wants, TIMEOUT_S).variants
        assert [len(one.stored) for one in found] == [1, *[0] * INLINE_KEYS]
    assert all(delete.result().removed == 0 for delete in deletes)


def test_a_corrupt_value_on_disk_is_a_miss_and_is_dropped(tmp_path: Path) -> None:
    raw = value(3 * MIB)
    with serving(tmp_path) as served:
        for number in (1, 2):
            put_value(served.client, key(number), raw, ack=Ack.DURABLE)
    with serving(tmp_path) as served:
        (lease,) = opened = served.store.reads.open([key(1)])
        served.store.reads.note_opened(opened)
        assert isinstance(lease, ReadLease)
        wants = [LookupKey.for_variant(key(1))]
        wait_until(
            lambda: served.store.reads.lookup(wants).variants[0].stored[0].tier is Tier.MEMORY
        )
        served.store.reads.release([lease.id])
        os.pwrite(served.store.disk_tier.fd, b"rot", lease.copy.extents[0].offset + 2 * MIB)
    with serving(tmp_path, memory_bytes=3 * MIB) as served:
        put_value(served.client, key(3), value(3 * MIB))
        served.store.mover.writer.flush()
        got = served.client.get([key(n) for n in (1, 2)], TIMEOUT_S)
        assert [getattr(found, "value", found) for _, found in got] == [Miss.CORRUPT, raw]
        wait_until(lambda: served.client.stats().corrupt == 1)
        assert get_value(served.client, key(1)) is None
        assert put_value(served.client, key(1), raw) is PutOutcome.STORED
        assert get_value(served.client, key(1)) == raw


def test_a_client_that_disconnects_during_a_put_leaves_nothing(served: ServedStore) -> None:
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
    wait_until(lambda: served.store.stats().memory_bytes == 0)
    assert get_value(served.client, key(1)) is None
    assert put_value(served.client, key(1), raw) is PutOutcome.STORED


def test_a_client_that_stops_reading_loses_its_leases(served: ServedStore) -> None:
    for number in range(4):
        put_value(served.client, key(number), value(4 * MIB, number))
    request = pb.GetRequest(keys=[to_key(key(number)) for number in range(4)])
    call = served.stub.Get(request, timeout=TIMEOUT_S)
    next(call)
    wait_until(lambda: served.store.stats().leases == 1)
    call.cancel()
    wait_until(lambda: served.store.stats().leases == 0)
    assert get_value(served.client, key(3)) == value(4 * MIB, 3)


def test_a_stalled_put_is_aborted_after_the_lease_time(
    served: ServedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_service, "LEASE_S", 0.2)
    over = threading.Event()

    def parts() -> Iterator[pb.PutPart]:
        yield header(value(3 * MIB))
        over.wait(TIMEOUT_S)

    call = served.stub.Put.future(parts(), timeout=TIMEOUT_S)
    with pytest.raises(grpc.RpcError, match="too slowly"):
        call.result()
    over.set()
    wait_until(lambda: served.store.stats().memory_bytes == 0)


def test_stalled_readers_do_not_block_others(
    served: ServedStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served.service._gets = asyncio.Semaphore(1)
    put_value(served.client, key(1), value(32 * MIB))
    put_value(served.client, key(2), value(10))
    monkeypatch.setattr(grpc_service, "LEASE_S", 2.0)
    stopped = served.stub.Get(pb.GetRequest(keys=[to_key(key(1))]), timeout=TIMEOUT_S)
    next(stopped)
    assert get_value(served.client, key(2)) == value(10)
    stopped.cancel()
    wait_until(lambda: not served.store.stats().leases)
    assert "ExecuteBatchError" not in caplog.text


def test_a_gated_service_answers_only_deletes_and_tombstones(
    served: ServedStore,
) -> None:
    put_value(served.client, key(1), value(10))
    served.service._gated = True
    with pytest.raises(Unavailable, match="pulling deletes from the other shards"):
        served.client.lookup([LookupKey.for_variant(key(1))])
    with pytest.raises(Unavailable, match="pulling deletes from the other shards"):
        get_value(served.client, key(1))
    with pytest.raises(Unavailable, match="pulling deletes from the other shards"):
        put_value(served.client, key(2), value(10))
    assert served.client.stats().variants == 1
    assert served.client.delete(Deletion(os.urandom(16), (key(1).chunk,))) == 1
    assert len(next(served.client.tombstones({})).deletions) == 1
    served.service.open()
    assert served.client.lookup([LookupKey.for_variant(key(1))]).variants[0].miss is Miss.DELETED


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_tokens": 0}, "header.info.num_tokens"),
        ({"num_tokens": MAX_TOKENS + 1}, "header.info.num_tokens"),
        ({"num_bytes": 0}, "header.info.num_bytes"),
        ({"num_bytes": 2 * MIB}, "header.info.num_bytes"),  # more than the memory tier
        ({"num_bytes": 2}, "header.part_bytes"),
        ({"base_position": MAX_TOKENS + 1}, "header.info.base_position"),
        ({"precision": "int7"}, "header.info.precision"),
    ],
)
def test_an_invalid_put_names_the_field(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    with serving(tmp_path, memory_bytes=MIB) as served:
        error = put_refusal(served, header(b"abc", **changes), pb.PutPart(data=b"abc"))
        assert error.field == field
        assert error.fix
        assert served.client.stats().variants == 0


def test_an_invalid_header_names_the_field(served: ServedStore) -> None:
    def refused(change: Callable[[pb.PutHeader], object]) -> str:
        first = header(b"abc")
        change(first.header)
        return put_refusal(served, first, pb.PutPart(data=b"abc")).field

    assert refused(lambda h: h.part_bytes.pop()) == "header.part_bytes"
    many = [0] * MAX_PARTS
    assert refused(lambda h: h.part_bytes.extend(many)) == "header.part_bytes"
    assert refused(lambda h: h.origin.ClearField("domain")) == "header.origin.domain"
    name = "x" * (MAX_NAME_CHARS + 1)
    assert refused(lambda h: setattr(h.origin, "document", name)) == "header.origin.document"
    assert refused(lambda h: setattr(h.as_of, "store", b"x")) == "header.as_of.store"
    assert refused(lambda h: setattr(h.key, "chunk", b"x")) == "header.key.chunk"
    assert refused(lambda h: h.origin.prefix_chunks.append(b"x")) == (
        "header.origin.prefix_chunks[0]"
    )


def test_an_invalid_completion_names_the_field(served: ServedStore) -> None:
    def refused(*completions: pb.PutCompletion) -> str:
        last = [pb.PutPart(completion=one) for one in completions]
        return put_refusal(served, header(b"abc"), pb.PutPart(data=b"abc"), *last).field

    right = checksum(b"abc")
    assert refused() == "completion"
    assert refused(pb.PutCompletion()) == "completion.checksums"
    assert refused(pb.PutCompletion(checksums=[right, 1])) == "completion.checksums"
    assert refused(pb.PutCompletion(checksums=[1])) == "completion.checksums[0]"
    for cost_s in (-1.0, math.nan, math.inf):
        bad = pb.PutCompletion(checksums=[right], cost_s=cost_s)
        assert refused(bad) == "completion.cost_s"
    assert refused(*[pb.PutCompletion(checksums=[right])] * 2) == "completion"
    assert served.client.stats().variants == 0


def test_data_of_the_wrong_length_is_refused(served: ServedStore) -> None:
    assert put_refusal(served, header(b"abc"), pb.PutPart(data=b"ab")).field == "data"
    assert put_refusal(served, header(b"abc"), pb.PutPart(data=b"abcd")).field == "data"
    wait_until(lambda: served.store.stats().memory_bytes == 0)


def test_messages_out_of_order_are_refused(served: ServedStore) -> None:
    data = pb.PutPart(data=b"abc")
    assert put_refusal(served).field == "header"
    assert put_refusal(served, data).field == "header"
    assert put_refusal(served, header(b"abc"), header(b"abc")).field == "header"


def test_keys_of_the_wrong_length_are_refused(served: ServedStore) -> None:
    bad = pb.VariantKey(chunk=b"short", prefix=bytes(16))
    call = served.stub.Lookup
    short = pb.LookupKey(chunk=b"short")
    assert refusal(lambda: call(pb.LookupRequest(keys=[short]))).field == "keys[0].chunk"
    assert (
        refusal(lambda: served.stub.Prefetch(pb.PrefetchRequest(keys=[bad]))).field
        == "keys[0].chunk"
    )
    deletion = pb.Deletion(id=b"short", chunks=[bytes(16)])
    assert (
        refusal(lambda: served.stub.Delete(pb.DeleteRequest(deletion=deletion))).field
        == "deletion.id"
    )
    documents = pb.Deletion(documents=["doc"])
    assert (
        refusal(lambda: served.stub.Delete(pb.DeleteRequest(deletion=documents))).field
        == "deletion.domain"
    )


def test_calls_with_values_need_a_deadline(served: ServedStore) -> None:
    with pytest.raises(grpc.RpcError, match="deadline"):
        served.stub.Put(iter([header(b"abc")]))
    with pytest.raises(grpc.RpcError, match="deadline"):
        list(served.stub.Get(pb.GetRequest()))


def test_health_says_serving(served: ServedStore) -> None:
    with grpc.insecure_channel(served.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
