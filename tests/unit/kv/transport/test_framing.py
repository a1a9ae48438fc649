"""Frames and messages round-trip, and an invalid frame ends the connection."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core import store_api
from ragcache_core.errors import InvalidInput, NotFound, RagCacheError, TooLarge, Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import (
    TAG_BYTES,
    Codec,
    Influence,
    Miss,
    Origin,
    Precision,
    Provenance,
    Tier,
    ValueHeader,
    ValuePart,
    ValueShape,
    VariantInfo,
)
from ragcache_kv.codecs import encoded_part_bytes
from ragcache_kv.transport.framing import (
    HEADER,
    READ_BYTES,
    ConnectionBroken,
    FramedConnection,
    FrameKind,
    TimedOut,
    frame,
    from_error,
    parse,
    to_error,
)
from ragcache_kv.values import conversions
from ragcache_wire.v1 import cachestore_pb2 as pb

MAX_VALUE_BYTES = 1 << 30
WAIT_S = 60.0

# Imports numba, which is no part of any test's time.
encoded_part_bytes(ValueShape(1, 1, 1, "bfloat16"), 1, Precision(Codec.INT8))

ids = st.binary(min_size=16, max_size=16)
keys = st.builds(VariantKey, ids, ids)
names = st.text(max_size=20)
infos = st.builds(
    VariantInfo,
    num_tokens=st.integers(1, store_api.MAX_TOKENS),
    num_bytes=st.integers(1, MAX_VALUE_BYTES),
    base_position=st.integers(0, store_api.MAX_TOKENS),
    provenance=st.builds(Provenance, exact=st.booleans()),
    precision=st.builds(Precision, st.sampled_from(Codec), st.sampled_from(Codec)),
)
# Seconds are floats of 32 bits in a message.
seconds = st.floats(0, 1e6, width=32)
digests = st.just(b"") | st.binary(min_size=16, max_size=16)
influences = st.builds(Influence, digests, digests, st.integers(0, 4096))
origins = st.builds(
    Origin,
    prefix_chunks=st.lists(ids, max_size=3).map(tuple),
    parent=st.none() | keys,
    domain=st.text(min_size=1, max_size=20),
    document=names,
    token_s=seconds,
    influence=influences,
)
parts = st.lists(
    st.builds(ValuePart, st.integers(0, 1 << 20), st.integers(0, 2**64 - 1)), min_size=1, max_size=5
).filter(lambda parts: sum(part.num_bytes for part in parts) > 0)
heads, dims = st.integers(1, 3), st.integers(1, 8)
dtypes = st.sampled_from(conversions.DTYPES)
sequences = st.integers(0, 2**64 - 1)
as_ofs = st.builds(store_api.AsOf, st.just(b"") | ids, sequences, sequences)


@st.composite
def new_variants(draw: st.DrawFn) -> store_api.NewVariant:
    drawn = tuple(draw(parts))
    info = draw(infos)
    shape = draw(st.none() | st.builds(ValueShape, st.just(len(drawn)), heads, dims, dtypes))
    # The size of packed numbers depends on the numbers.
    if shape is not None and Codec.PACKED not in {info.precision.key, info.precision.value}:
        part_bytes = encoded_part_bytes(shape, info.num_tokens, info.precision)
        drawn = tuple(replace(part, num_bytes=part_bytes) for part in drawn)
    sizes = tuple(part.num_bytes for part in drawn)
    info = replace(info, num_bytes=sum(sizes))
    return store_api.NewVariant(
        draw(keys), info, draw(origins), shape, sizes, draw(st.integers(0, 9)), draw(as_ofs)
    )


held = st.builds(
    store_api.StoredVariant,
    key=keys,
    info=infos,
    tier=st.sampled_from(Tier),
    load_s=seconds,
    prefix_chunks=st.lists(ids, max_size=3).map(tuple),
    copies=st.lists(names, max_size=3).map(tuple),
    wants_higher_precision=st.booleans(),
    influence=influences,
)
OWN_MISSES = {Miss.TIMED_OUT, Miss.LOST, Miss.FORGED}  # no store tells them
told_misses = st.sampled_from([miss for miss in Miss if miss not in OWN_MISSES])
variants = st.builds(
    store_api.ChunkVariants, st.lists(held, min_size=1, max_size=3).map(tuple), st.none()
) | st.builds(store_api.ChunkVariants, st.just(()), told_misses)


@given(new_variants(), st.sampled_from(store_api.Ack))
def test_a_put_round_trips(variant: store_api.NewVariant, ack: store_api.Ack) -> None:
    raw = conversions.to_put_header(variant, ack).SerializeToString()
    header = pb.PutHeader.FromString(raw)
    assert conversions.from_put_header("header", header, MAX_VALUE_BYTES) == (variant, ack)


@given(st.lists(variants, max_size=4).map(tuple), ids, sequences)
def test_a_lookup_round_trips(found: Any, store: bytes, sequence: int) -> None:
    answer = store_api.LookupAnswer(found, store_api.AsOf(store, sequence))
    raw = conversions.to_lookup_reply(answer, 3).SerializeToString()
    assert conversions.from_lookup_reply(pb.LookupReply.FromString(raw), store) == answer


@given(
    st.lists(st.builds(store_api.LookupKey, ids, st.none() | ids, st.booleans()), max_size=4),
    st.booleans(),
    names,
)
def test_lookup_keys_round_trip(wants: Any, exact: bool, domain: str) -> None:
    raw = conversions.to_lookup_request(wants, exact, domain).SerializeToString()
    request = pb.LookupRequest.FromString(raw)
    assert conversions.from_lookup_request(request) == (wants, exact, domain)


def _names_something(deletion: store_api.Deletion) -> bool:
    """Return whether a Deletion is valid: documents need a domain, and a whole domain is alone."""
    if deletion.documents:
        return bool(deletion.domain)
    return bool(deletion.chunks or deletion.variants) != bool(deletion.domain)


@given(
    st.builds(
        store_api.Deletion,
        id=st.just(b"") | ids,
        chunks=st.lists(ids, max_size=3).map(tuple),
        variants=st.lists(keys, max_size=3).map(tuple),
        documents=st.lists(st.text(min_size=1, max_size=9), max_size=3).map(tuple),
        domain=st.text(max_size=9),
        made_at_ms=sequences,
    ).filter(_names_something)
)
def test_a_deletion_round_trips(deletion: store_api.Deletion) -> None:
    raw = conversions.to_deletion(deletion).SerializeToString()
    assert conversions.from_deletion("deletion", pb.Deletion.FromString(raw)) == deletion


@pytest.mark.parametrize(
    ("deletion", "field"),
    [
        (pb.Deletion(), "deletion"),
        (pb.Deletion(id=bytes(16), made_at_ms=5), "deletion"),
        (pb.Deletion(documents=["doc"]), "deletion.domain"),
        # A chunk and a domain together are ambiguous.
        (pb.Deletion(chunks=[bytes(16)], domain="acme"), "deletion.domain"),
        (
            pb.Deletion(variants=[pb.VariantKey(chunk=bytes(16), prefix=bytes(16))], domain="acme"),
            "deletion.domain",
        ),
    ],
    ids=["nothing", "an id", "documents of no domain", "chunks", "variants"],
)
def test_a_deletion_of_nothing_or_of_too_much_is_refused(deletion: pb.Deletion, field: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        conversions.from_deletion("deletion", deletion)
    assert raised.value.field == field


@given(st.dictionaries(keys, st.floats(0.0, 1.0, width=32), max_size=4), st.booleans(), names)
def test_a_get_round_trips(used: dict[VariantKey, float], exact: bool, domain: str) -> None:
    wanted = list(used)
    for overheads in ({}, used):
        raw = conversions.to_get_request(
            wanted, exact, domain, fix_overheads=overheads
        ).SerializeToString()
        uses = [store_api.VariantUse(overheads.get(one, 0.0)) for one in wanted]
        request = pb.GetRequest.FromString(raw)
        assert conversions.from_get_request(request) == (wanted, exact, domain, uses)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=4).map(tuple), seconds)
def test_a_completion_round_trips(checksums: tuple[int, ...], cost_s: float) -> None:
    completion = store_api.PutCompletion(checksums, cost_s)
    raw = conversions.to_completion(completion).SerializeToString()
    message = pb.PutCompletion.FromString(raw)
    assert conversions.from_completion("c", message, len(checksums)) == completion
    with pytest.raises(InvalidInput) as refused:
        conversions.from_completion("c", message, len(checksums) + 1)
    assert refused.value.field == "c.checksums"


@given(new_variants(), st.sampled_from(Tier))
def test_a_value_header_round_trips(new: store_api.NewVariant, tier: Tier) -> None:
    sizes = enumerate(new.part_bytes)
    parts = tuple(ValuePart(n, i) for i, n in sizes)
    told = ValueHeader(new.info, parts, new.shape, new.value_format, tier, bytes(TAG_BYTES))
    header = conversions.to_value_header(3, told)
    read = conversions.from_value_header("f", pb.GetHeader.FromString(header.SerializeToString()))
    assert read == told


@pytest.mark.parametrize("outcome", store_api.PutOutcome)
def test_outcomes_round_trip(outcome: store_api.PutOutcome) -> None:
    assert conversions.from_outcome(conversions.to_outcome(outcome)) is outcome


@pytest.mark.parametrize("miss", [m for m in Miss if m not in OWN_MISSES])
def test_misses_round_trip(miss: Miss) -> None:
    assert conversions.from_miss(conversions.to_miss(miss)) is miss
    assert conversions.from_miss(pb.MISS_UNSPECIFIED) is None


def good_header() -> pb.PutHeader:
    variant = store_api.NewVariant(
        VariantKey(bytes(16), bytes(16)),
        VariantInfo(8, 256, 0, Provenance(exact=True)),
        Origin(),
        ValueShape(2, 1, 4, "bfloat16"),
        (128, 128),
    )
    return conversions.to_put_header(variant, store_api.Ack.ACCEPTED)


def shift(header: pb.PutHeader, num_bytes: int) -> None:
    """Change two parts so that they add up, but neither has a layer's size."""
    header.part_bytes[1] -= num_bytes
    header.info.num_bytes -= num_bytes


MISTAKES: list[tuple[str, Callable[[pb.PutHeader], object]]] = [
    ("header.key.chunk", lambda h: setattr(h.key, "chunk", bytes(15))),
    ("header.key.prefix", lambda h: setattr(h.key, "prefix", b"")),
    ("header.info.num_tokens", lambda h: setattr(h.info, "num_tokens", 0)),
    ("header.info.num_tokens", lambda h: setattr(h.info, "num_tokens", 1_000_001)),
    ("header.info.num_bytes", lambda h: setattr(h.info, "num_bytes", 0)),
    ("header.info.num_bytes", lambda h: setattr(h.info, "num_bytes", 1 << 31)),
    ("header.info.base_position", lambda h: setattr(h.info, "base_position", 1 << 31)),
    ("header.info.precision", lambda h: setattr(h.info, "precision", "int3")),
    ("header.part_bytes", lambda h: h.ClearField("part_bytes")),
    ("header.part_bytes", lambda h: h.part_bytes.append(11)),
    ("header.part_bytes", lambda h: h.part_bytes.extend([0] * 2000)),
    ("header.part_bytes", lambda h: setattr(h.shape, "num_layers", 3)),
    ("header.part_bytes[0]", lambda h: setattr(h.info, "num_tokens", 9)),
    ("header.part_bytes[0]", lambda h: setattr(h.info, "precision", "int8/native")),
    ("header.part_bytes[0]", lambda h: setattr(h.shape, "num_kv_heads", 2)),
    ("header.part_bytes[0]", lambda h: setattr(h.shape, "head_dim", 5)),
    ("header.part_bytes[0]", lambda h: setattr(h.shape, "dtype", "float32")),
    ("header.part_bytes[1]", lambda h: shift(h, 1)),
    ("header.shape.num_layers", lambda h: setattr(h.shape, "num_layers", 0)),
    ("header.shape.head_dim", lambda h: setattr(h.shape, "head_dim", 1 << 30)),
    ("header.shape.dtype", lambda h: setattr(h.shape, "dtype", "int7")),
    ("header.origin.domain", lambda h: setattr(h.origin, "domain", "")),
    ("header.origin.domain", lambda h: setattr(h.origin, "domain", "x" * 600)),
    ("header.origin.document", lambda h: setattr(h.origin, "document", "x" * 600)),
    ("header.origin.parent.chunk", lambda h: setattr(h.origin.parent, "chunk", b"x")),
    ("header.origin.prefix_chunks[0]", lambda h: h.origin.prefix_chunks.append(b"x")),
    ("header.origin.influence.rights", lambda h: setattr(h.origin.influence, "rights", b"x")),
    ("header.origin.influence.writer", lambda h: setattr(h.origin.influence, "writer", b"x")),
    ("header.origin.influence.num_head", lambda h: setattr(h.origin.influence, "num_head", 5000)),
    ("header.origin.prefix_chunks", lambda h: h.origin.prefix_chunks.extend([bytes(16)] * 5000)),
    ("header.as_of.store", lambda h: setattr(h.as_of, "store", b"x")),
]


@pytest.mark.parametrize(("field", "spoil"), MISTAKES, ids=[field for field, _ in MISTAKES])
def test_the_error_names_the_invalid_field_of_a_put(
    field: str, spoil: Callable[[pb.PutHeader], object]
) -> None:
    header = good_header()
    conversions.from_put_header("header", header, MAX_VALUE_BYTES)
    spoil(header)
    with pytest.raises(InvalidInput) as raised:
        conversions.from_put_header("header", header, MAX_VALUE_BYTES)
    assert raised.value.field == field


def test_sizes_that_contradict_the_shape_are_explained() -> None:
    header = good_header()
    header.shape.num_kv_heads = 2
    with pytest.raises(InvalidInput) as raised:
        conversions.from_put_header("header", header, MAX_VALUE_BYTES)
    assert raised.value.problem == "is 128"
    assert raised.value.fix.startswith("send the 256 bytes that 8 tokens")


@pytest.mark.parametrize("precision", ["packed", "native/packed", "packed/int8"])
def test_packed_parts_are_as_long_as_their_numbers_make_them(precision: str) -> None:
    header = good_header()
    header.info.precision = precision
    shift(header, 30)
    variant, _ = conversions.from_put_header("header", header, MAX_VALUE_BYTES)
    assert variant.part_bytes == (128, 98)


def test_opaque_parts_may_have_any_size() -> None:
    header = good_header()
    header.ClearField("shape")
    shift(header, 30)
    variant, _ = conversions.from_put_header("header", header, MAX_VALUE_BYTES)
    assert variant.shape is None


@given(st.binary(max_size=60))
def test_invalid_bytes_raise_only_invalid_input(raw: bytes) -> None:
    readers: list[Callable[[], object]] = [
        lambda: conversions.from_get_request(parse(pb.GetRequest, memoryview(raw))),
        lambda: conversions.from_put_header("h", parse(pb.PutHeader, memoryview(raw)), 1 << 20),
        lambda: conversions.from_lookup_request(parse(pb.LookupRequest, memoryview(raw))),
        lambda: conversions.from_deletion("d", parse(pb.Deletion, memoryview(raw))),
    ]
    for read in readers:
        with contextlib.suppress(InvalidInput):
            read()


ERRORS = [
    InvalidInput("top_k", "is 0", "send 1"),
    TooLarge("süß\n", "has 9 MiB", "send less"),
    NotFound("document", "a/b", "list them"),
    Unavailable("cachestore", "it is full", 2.5),
    RagCacheError("something else"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_round_trip(error: RagCacheError) -> None:
    again = from_error("cachestore", pb.DataError.FromString(to_error(error).SerializeToString()))
    assert type(again) is type(error)
    assert str(error) in str(again)
    if type(error) is not RagCacheError:
        assert vars(again) == vars(error)


@pytest.fixture
def ends() -> Iterator[tuple[FramedConnection, FramedConnection]]:
    one, other = (FramedConnection(sock) for sock in socket.socketpair())
    one.deadline = other.deadline = time.monotonic() + WAIT_S
    yield one, other
    one.close()
    other.close()


@pytest.mark.parametrize("size", [0, 1, READ_BYTES - 20, READ_BYTES, READ_BYTES + 1, 300_000])
def test_frames_and_raw_bytes_arrive_as_sent(
    ends: tuple[FramedConnection, FramedConnection], size: int
) -> None:
    one, other = ends
    store, raw = bytes(range(256)) * (size // 256) + bytes(size % 256), bytes(range(200)) * 500
    sent = pb.HelloReply(store=store)

    def send() -> None:
        for _ in range(3):
            one.send(FrameKind.WELCOME, sent)
            one.send_raw(raw)
            one.send(FrameKind.COMMIT)

    thread = threading.Thread(target=send)
    thread.start()
    for _ in range(3):
        kind, payload = other.receive(1 << 20)
        assert kind == FrameKind.WELCOME
        assert parse(pb.HelloReply, payload) == sent
        target = memoryview(bytearray(len(raw)))
        other.receive_into(target)
        assert target == raw
        assert other.receive(0) == (FrameKind.COMMIT, memoryview(b""))
    thread.join()


def test_a_deferred_frame_follows_the_next_frame(
    ends: tuple[FramedConnection, FramedConnection],
) -> None:
    one, other = ends
    one.deferred.append((FrameKind.RELEASE, pb.LeaseRelease(leases=[5])))
    one.send(FrameKind.GET, pb.GetRequest())
    assert other.receive(100)[0] == FrameKind.GET
    assert other.receive(100)[0] == FrameKind.RELEASE
    assert not one.deferred


def test_a_deferred_release_precedes_a_put_and_follows_other_frames(
    ends: tuple[FramedConnection, FramedConnection],
) -> None:
    """Nothing may come between PUT and its value."""
    one, other = ends
    for kind, expected in (
        (FrameKind.PUT, [FrameKind.RELEASE, FrameKind.PUT]),
        (FrameKind.GET, [FrameKind.GET, FrameKind.RELEASE]),
    ):
        one.deferred = [(FrameKind.RELEASE, pb.LeaseRelease())]
        one.send(kind)
        assert [other.receive(0)[0] for _ in range(2)] == expected
        assert not one.deferred


@pytest.mark.parametrize("size", [0, 1, READ_BYTES, 3_000_000])
@pytest.mark.parametrize("taken", [False, True])
def test_bytes_after_a_message_may_be_taken_or_left(
    ends: tuple[FramedConnection, FramedConnection], size: int, taken: bool
) -> None:
    one, other = ends
    data = memoryview(Random(size).randbytes(size))
    asked = pb.PutHeader(traceparent="t")

    def send() -> None:
        for _ in range(2):
            one.deferred = [(FrameKind.RELEASE, pb.LeaseRelease())]
            one.send(FrameKind.PUT, asked, [data, frame(FrameKind.COMMIT)], skippable=True)
        one.send(FrameKind.GET, asked, [data])  # not to be left
        one.send(FrameKind.ABORT)

    thread = threading.Thread(target=send)
    thread.start()
    target = memoryview(bytearray(size))
    for _ in range(2):
        assert other.receive(100)[0] == FrameKind.RELEASE
        kind, payload = other.receive(100)
        assert kind == FrameKind.PUT
        assert parse(pb.PutHeader, payload) == asked
        if taken:
            other.accept_early_bytes()
            other.receive_into(target)
            assert target == data
            assert other.receive(100)[0] == FrameKind.COMMIT
    assert other.receive(100)[0] == FrameKind.GET
    other.receive_into(target)
    assert target == data
    assert other.receive(100)[0] == FrameKind.ABORT
    thread.join()


def test_a_reader_that_trickles_does_not_stretch_the_deadline_of_a_file(
    ends: tuple[FramedConnection, FramedConnection], tmp_path: Path
) -> None:
    one, other = ends
    path = tmp_path / "file"
    stop = threading.Event()
    with path.open("w+b") as file:
        file.truncate(64 << 20)

        def trickle() -> None:
            with contextlib.suppress(OSError):
                while other.socket.recv(16 << 10):
                    stop.wait(0.005)

        reader = threading.Thread(target=trickle)
        reader.start()
        one.deadline = time.monotonic() + 0.1
        with pytest.raises(TimedOut):
            one.send_file(file.fileno(), 0, 64 << 20)
    stop.set()
    one.close()
    reader.join()


def test_a_frame_over_its_bound_is_not_read(
    ends: tuple[FramedConnection, FramedConnection],
) -> None:
    one, other = ends
    one.send_raw(HEADER.pack(101, FrameKind.GET, 0))
    with pytest.raises(ConnectionBroken, match="101 bytes"):
        other.receive(100)


def test_the_close_of_the_other_end_is_noticed(
    ends: tuple[FramedConnection, FramedConnection],
) -> None:
    one, other = ends
    one.send_raw(HEADER.pack(10, FrameKind.GET, 0) + b"half")
    one.close()
    with pytest.raises(ConnectionBroken, match="closed"):
        other.receive(100)
    with pytest.raises(ConnectionBroken):
        other.send_raw(bytes(64 << 20))


def test_silence_ends_with_the_deadline(ends: tuple[FramedConnection, FramedConnection]) -> None:
    one, other = ends
    other.deadline = time.monotonic() + 0.05
    with pytest.raises(TimedOut):
        other.receive(100)
    one.deadline = time.monotonic() + 0.05
    with pytest.raises(TimedOut):  # the other end does not read
        one.send_raw(bytes(64 << 20))
    with pytest.raises(TimedOut):
        one.send(FrameKind.GET)


def test_bytes_that_trickle_in_do_not_stretch_a_deadline(
    ends: tuple[FramedConnection, FramedConnection],
) -> None:
    one, other = ends
    stop = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(ConnectionBroken):
            while not stop.wait(0.02):
                one.send_raw(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    other.deadline = time.monotonic() + 0.3
    with pytest.raises(TimedOut):
        other.receive_into(memoryview(bytearray(1 << 20)))
    stop.set()
    thread.join()
