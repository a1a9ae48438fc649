"""The re-encoder over a store in a dictionary with real bytes, and over a real store."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ragcache_cachestore.background.graded_assignment import NUM_SAMPLES, GradedAssignment
from ragcache_cachestore.background.re_encoder import (
    Allowance,
    Pace,
    ReEncoder,
    native_bytes,
)
from ragcache_cachestore.background.variant_access import VariantAccess
from ragcache_cachestore.puts import IncomingPut
from ragcache_cachestore.state.catalog import CatalogVariant
from ragcache_cachestore.state.leases import ReadLease
from ragcache_cachestore.state.store_state import StoreOptions
from ragcache_cachestore.storage.tier_space import TierCopy
from ragcache_cachestore.store import Store
from ragcache_core.errors import Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import (
    Codec,
    Miss,
    Origin,
    Precision,
    Provenance,
    Tier,
    ValuePart,
    ValueShape,
    ValueTags,
    VariantInfo,
)
from ragcache_core.store_api import Ack, LookupKey, NewVariant, PutCompletion, PutOutcome
from ragcache_core.tiering.precision_assignment import (
    HA_RAG_SCHEMES,
    NATIVE,
    HaRagAssignment,
    PrecisionAssignment,
    RankPlacement,
)
from ragcache_core.tiering.precision_policy import PrecisionPolicy, Scheme
from ragcache_core.tiering.score_assignment import Grade, ScoreAssignment
from ragcache_kv.codecs import decode_part
from ragcache_kv.values.layout import FORMAT, checksum
from tests.kit.clock import ManualClock
from tests.kit.wait import wait_until

LIMIT_S = 120.0
SHAPE = ValueShape(num_layers=2, num_kv_heads=2, head_dim=64, dtype="bfloat16")
TOKENS = 4
NATIVE_BYTES = 2 * 2 * TOKENS * 2 * 64 * 2
INT8 = Precision(Codec.INT8, Codec.INT8)
GSE8 = Precision(Codec.GSE8, Codec.GSE8)
PACKED = Precision(Codec.PACKED, Codec.PACKED)
MIXED = Precision(Codec.INT8, Codec.INT4)
PACE = Pace(scan_interval_s=10, half_life_s=100, min_age_s=30, num_scans=3, encode_bytes_per_s=1e9)


def fixed(
    precision: Precision = NATIVE, placement: RankPlacement | None = None
) -> PrecisionAssignment:
    """Return an assignment of one precision to all variants."""
    return HaRagAssignment((precision,), (), placement or RankPlacement())


def key(name: int) -> VariantKey:
    return VariantKey(name.to_bytes(16, "big"), bytes(16))


def numbers(seed: int) -> np.ndarray:
    """A native value as float32 whose numbers are exact in bfloat16."""
    rng = np.random.default_rng(seed)
    wide = rng.standard_normal(NATIVE_BYTES // 2).astype(np.float32)
    return (wide.view(np.uint32) & 0xFFFF0000).view(np.float32)


def bfloat16(wide: np.ndarray) -> bytes:
    return (wide.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def widened(raw: np.ndarray) -> np.ndarray:
    return (np.frombuffer(raw.tobytes(), np.uint16).astype(np.uint32) << 16).view(np.float32)


def copies(tier: Tier) -> dict[str, Any]:
    """Return the fields of a variant that is in a tier."""
    copy = TierCopy((), NATIVE_BYTES)
    return {"memory": copy if tier is Tier.MEMORY else None, "disk": copy}


@dataclass
class FakeVariant:
    candidate: CatalogVariant
    value: bytes
    busy: bool = False


class DictStore:
    """A VariantAccess without tiers, threads or bounds."""

    def __init__(self) -> None:
        self.held: dict[VariantKey, FakeVariant] = {}
        self.prefetched: list[VariantKey] = []
        self.down = False
        self.lossy_readers = True
        self._identities = itertools.count()

    def put(self, name: int, *, shape: ValueShape | None = SHAPE, tier: Tier = Tier.MEMORY) -> None:
        value = bfloat16(numbers(name))
        half = len(value) // 2
        info = VariantInfo(TOKENS, len(value), 0, Provenance(exact=True))
        parts = tuple(ValuePart(half, checksum(value[i * half : (i + 1) * half])) for i in range(2))
        self.held[key(name)] = FakeVariant(
            CatalogVariant(
                *(key(name), next(self._identities), info, parts, Origin(), shape, FORMAT),
                delete_sequence=0,
                put_at=0.0,
                **copies(tier),
            ),
            value,
        )

    def use(self, name: int, times: int = 1) -> None:
        record = self.held[key(name)]
        record.candidate = replace(record.candidate, reads=record.candidate.reads + times)

    def precision(self, name: int) -> Precision:
        return self.held[key(name)].candidate.info.precision

    def decoded(self, name: int) -> np.ndarray:
        record = self.held[key(name)]
        start, layers = 0, []
        for part in record.candidate.parts:
            raw = record.value[start : start + part.num_bytes]
            assert checksum(raw) == part.checksum
            start += part.num_bytes
            encoded = np.frombuffer(bytearray(raw), np.uint8)
            native = decode_part(encoded, SHAPE, TOKENS, self.precision(name))
            layers.append(widened(native))
        return np.concatenate(layers)

    def all(self) -> Iterator[CatalogVariant]:
        if self.down:
            raise Unavailable("disk", "is full")
        return iter([record.candidate for record in self.held.values()])

    def read(self, key: VariantKey, identity: int) -> bytearray | None:
        record = self.held.get(key)
        if record is None or record.candidate.identity != identity:
            return None
        return bytearray(record.value)

    def has_lossy_readers(self) -> bool:
        return self.lossy_readers

    def swap(
        self,
        key: VariantKey,
        identity: int,
        precision: Precision,
        parts: Sequence[ValuePart],
        views: Sequence[memoryview],
    ) -> bool:
        record = self.held.get(key)
        if record is None or record.busy or record.candidate.identity != identity:
            return False
        record.value = b"".join(views)
        info = replace(record.candidate.info, precision=precision, num_bytes=len(record.value))
        record.candidate = replace(
            record.candidate, identity=next(self._identities), info=info, parts=tuple(parts)
        )
        return True

    def set_wants_higher_precision(self, key: VariantKey, wanted: bool) -> None:
        if (record := self.held.get(key)) is not None:
            record.candidate = replace(record.candidate, wants_higher_precision=wanted)

    def prefetch(self, keys: Sequence[VariantKey]) -> int:
        self.prefetched.extend(keys)
        for record in (self.held[one] for one in keys if one in self.held):
            record.candidate = replace(record.candidate, **copies(Tier.MEMORY))
        return len(keys)


def run(re_encoder: ReEncoder, clock: ManualClock, seconds: float) -> None:
    """Do what the thread would do in that time."""
    until = clock.now + seconds
    while clock.now < until:
        clock.now = min(until, clock.now + max(re_encoder.step(clock.now), 1e-3))


def make(
    assignment: PrecisionAssignment, pace: Pace = PACE
) -> tuple[DictStore, ReEncoder, ManualClock]:
    store, clock = DictStore(), ManualClock()
    return store, ReEncoder(cast("VariantAccess", store), assignment, pace, clock), clock


def test_exact_values_stay_exact_by_default() -> None:
    store, re_encoder, clock = make(fixed())
    for name in range(10):
        store.put(name)
    run(re_encoder, clock, 200)
    assert re_encoder.counters.scans >= 19
    assert re_encoder.counters.re_encoded == 0
    assert all(record.candidate.info.serves_exact for record in store.held.values())


def test_ha_rag_assigns_a_precision_to_each_rank() -> None:
    store, re_encoder, clock = make(HaRagAssignment())
    for name in range(20):
        store.put(name)
        store.use(name, times=20 - name)
    run(re_encoder, clock, 200)
    assert [store.precision(name) for name in range(20)] == [
        scheme
        for scheme, times in zip(HA_RAG_SCHEMES, (2, 2, 2, 14), strict=True)
        for _ in range(times)
    ]
    for name in range(20):
        error = store.decoded(name) - numbers(name)
        assert np.sqrt(np.mean(error**2)) < 0.1
    saved = sum(NATIVE_BYTES - record.candidate.info.num_bytes for record in store.held.values())
    assert re_encoder.counters.bytes_saved == saved > 0.4 * 20 * NATIVE_BYTES
    assert not any(record.candidate.info.serves_exact for record in store.held.values())


def test_score_assignment_keeps_hot_variants_exact_and_shrinks_the_rest() -> None:
    grades = (Grade(INT8, 0.53, 0.005), Grade(MIXED, 0.41, 0.03))
    store, re_encoder, clock = make(ScoreAssignment(grades, max_error=0.001))
    for name in range(10):
        store.put(name)
    store.use(0, times=1000)
    store.use(1, times=3)
    run(re_encoder, clock, 100)
    assert store.precision(0) == Precision()
    assert store.precision(9) == MIXED


def test_young_variants_and_single_scans_change_nothing() -> None:
    store, re_encoder, clock = make(fixed(INT8), replace(PACE, min_age_s=35))
    store.put(0)
    run(re_encoder, clock, 40)  # scans at 10, 20 and 30 s: the variant is known for 20 s
    assert store.precision(0) == Precision()
    run(re_encoder, clock, 9.9)  # known for 30 s, after four scans
    assert store.precision(0) == Precision()
    run(re_encoder, clock, 1)
    assert store.precision(0) == INT8


def test_re_encoding_respects_its_rate() -> None:
    store, re_encoder, clock = make(fixed(INT8), replace(PACE, encode_bytes_per_s=NATIVE_BYTES / 4))
    for name in range(30):
        store.put(name)
    run(re_encoder, clock, 40)
    begun = clock.now
    for _ in range(20):
        run(re_encoder, clock, 4)
        assert re_encoder.counters.re_encoded <= 1 + (clock.now - begun) / 4
    assert re_encoder.counters.re_encoded >= 19


def test_the_coldest_variant_is_re_encoded_first() -> None:
    store, re_encoder, clock = make(
        fixed(INT8), replace(PACE, encode_bytes_per_s=NATIVE_BYTES / 1000)
    )
    for name in range(5):
        store.put(name)
        store.use(name, times=1 + (name - 3) ** 2)
    run(re_encoder, clock, 100)
    assert [name for name in range(5) if store.precision(name) == INT8] == [3]


def test_a_variant_that_turns_hot_wants_higher_precision_until_it_is_put_again() -> None:
    store, re_encoder, clock = make(HaRagAssignment(shares=(0.5, 0, 0)))
    for name in range(2):
        store.put(name)
    store.use(0, times=10)
    run(re_encoder, clock, 100)
    assert (store.precision(0), store.precision(1)) == (HA_RAG_SCHEMES[0], HA_RAG_SCHEMES[3])
    before = store.held[key(1)].value
    store.use(1, times=1000)
    run(re_encoder, clock, 100)
    assert store.held[key(1)].candidate.wants_higher_precision
    assert re_encoder.counters.wanting_higher_precision == 1
    assert store.held[key(1)].value == before
    store.put(1)
    store.use(1, times=1000)
    run(re_encoder, clock, 100)
    assert store.precision(1) == HA_RAG_SCHEMES[0]
    assert not store.held[key(1)].candidate.wants_higher_precision
    assert np.abs(store.decoded(1) - numbers(1)).max() < 0.05


def test_a_variant_below_the_fixed_precision_wants_more_and_is_not_changed() -> None:
    store, re_encoder, clock = make(fixed(MIXED))
    store.put(0)
    run(re_encoder, clock, 100)
    assert store.precision(0) == MIXED
    exact = ReEncoder(cast("VariantAccess", store), fixed(), PACE, clock)
    run(exact, clock, 100)
    assert store.precision(0) == MIXED
    assert store.held[key(0)].candidate.wants_higher_precision


def test_a_lossy_value_is_not_encoded_once_more() -> None:
    store, re_encoder, clock = make(fixed(INT8))
    store.put(0)
    run(re_encoder, clock, 100)
    coarser = ReEncoder(cast("VariantAccess", store), fixed(MIXED), PACE, clock)
    run(coarser, clock, 100)
    assert store.precision(0) == INT8


def test_nothing_loses_precision_before_a_reader_may_use_it() -> None:
    store, re_encoder, clock = make(fixed(INT8))
    store.lossy_readers = False
    store.put(0)
    run(re_encoder, clock, 200)
    assert store.precision(0) == NATIVE
    store.lossy_readers = True
    run(re_encoder, clock, 100)
    assert store.precision(0) == INT8


def test_lossless_encodings_wait_for_no_reader() -> None:
    store, re_encoder, clock = make(fixed(PACKED))
    store.lossy_readers = False
    store.put(0)
    run(re_encoder, clock, 100)
    assert re_encoder.counters.re_encoded + len(re_encoder._incompressible) == 1


def test_a_value_is_re_encoded_only_as_its_client_has_tagged_it() -> None:
    store, re_encoder, clock = make(fixed(INT8))
    for name, tags in enumerate(
        (ValueTags(bytes(16)), ValueTags(bytes(16), ((INT8, bytes(16)),)), ValueTags(b""))
    ):
        store.put(name)
        store.held[key(name)].candidate.tag = tags.to_bytes()
    run(re_encoder, clock, 100)
    assert [store.precision(name) for name in range(3)] == [NATIVE, INT8, INT8]


def test_scheme_score_measures_the_grades_before_it_assigns_them() -> None:
    policy = PrecisionPolicy(Scheme.SCORE, (NATIVE, INT8, GSE8), max_error=0.02)
    assignment = GradedAssignment(policy, memory_bytes=1 << 20)
    store, re_encoder, clock = make(assignment)
    for name in range(NUM_SAMPLES - 1):
        store.put(name)
    run(re_encoder, clock, 100)
    assert assignment.needs_samples
    assert {store.precision(name) for name in range(NUM_SAMPLES - 1)} == {NATIVE}
    store.put(NUM_SAMPLES - 1)
    for name in range(2):
        store.use(name, times=100)
    run(re_encoder, clock, 100)
    assert not assignment.needs_samples
    # Nearly all reads are of two variants, so that the others hardly count for the bound.
    assert {store.precision(name) for name in range(2)} <= {NATIVE, INT8}
    assert {store.precision(name) for name in range(2, NUM_SAMPLES)} == {GSE8}


def test_values_that_cannot_be_measured_do_not_stop_the_measurement() -> None:
    """One does not decode, and one has numbers that are not finite."""
    policy = PrecisionPolicy(Scheme.SCORE, (NATIVE, INT8), max_error=0.02)
    assignment = GradedAssignment(policy, memory_bytes=1 << 20)
    store, re_encoder, clock = make(assignment)
    for name in range(NUM_SAMPLES + 2):
        store.put(name)
    for name, wrong in ((0, b"\0"), (1, b"\x80\x7f")):  # zeros that claim to be packed, infinity
        record = store.held[key(name)]
        record.value = wrong * (len(record.value) // len(wrong))
        half = len(record.value) // 2
        parts = tuple(ValuePart(half, checksum(record.value[at : at + half])) for at in (0, half))
        precision = PACKED if name == 0 else NATIVE
        info = replace(record.candidate.info, precision=precision)
        record.candidate = replace(record.candidate, info=info, parts=parts)
    identities = [store.held[key(name)].candidate.identity for name in range(2)]
    run(re_encoder, clock, 100)
    assert not assignment.needs_samples
    assert all(map(assignment.has_seen, identities))
    # Of each measured value, and of none that is not finite.
    assert all(np.isfinite(sums).all() for sums in assignment._sums.values())


def test_corrupt_bytes_are_not_re_encoded() -> None:
    store, re_encoder, clock = make(fixed(INT8))
    store.put(0)
    record = store.held[key(0)]
    record.value = bytes([record.value[0] ^ 1]) + record.value[1:]
    before = record.value
    run(re_encoder, clock, 60)
    assert re_encoder.counters.corrupt >= 1
    assert record.value == before


def test_a_value_of_impossible_size_does_not_stop_the_re_encoder() -> None:
    store, re_encoder, clock = make(fixed(INT8))
    store.put(0)
    store.put(1)
    record = store.held[key(0)]
    record.value = record.value[:-3]
    cut = record.value[NATIVE_BYTES // 2 :]
    info = replace(record.candidate.info, num_bytes=len(record.value))
    parts = (record.candidate.parts[0], ValuePart(len(cut), checksum(cut)))
    record.candidate = replace(record.candidate, info=info, parts=parts)
    run(re_encoder, clock, 200)
    assert store.precision(1) == INT8
    assert store.precision(0) == Precision()
    assert re_encoder.counters.corrupt == 1


def test_a_leased_variant_is_tried_again() -> None:
    store, re_encoder, clock = make(fixed(INT8))
    store.put(0)
    store.held[key(0)].busy = True
    run(re_encoder, clock, 60)
    assert re_encoder.counters.refused >= 1
    assert store.precision(0) == Precision()
    store.held[key(0)].busy = False
    run(re_encoder, clock, 20)
    assert store.precision(0) == INT8


def test_opaque_values_are_not_re_encoded() -> None:
    store, re_encoder, clock = make(fixed(INT8))
    store.put(0, shape=None)
    store.put(1, shape=replace(SHAPE, dtype="float8"))
    store.put(2, shape=replace(SHAPE, num_layers=7))
    store.put(3)
    record = store.held[key(3)]
    record.candidate = replace(record.candidate, value_format=FORMAT + 1)
    run(re_encoder, clock, 100)
    assert re_encoder.counters.re_encoded == 0


def test_hot_variants_are_promoted_at_a_bounded_rate() -> None:
    placement = RankPlacement(gpu_share=0.1, pinned_share=0.1, pageable_share=0.2)
    store, re_encoder, clock = make(
        fixed(placement=placement), replace(PACE, move_bytes_per_s=NATIVE_BYTES / 2)
    )
    for name in range(10):
        store.put(name, tier=Tier.DISK)
        store.use(name, times=10 - name)
    run(re_encoder, clock, 15)
    assert store.prefetched == [key(0), key(1), key(2)]
    run(re_encoder, clock, 10)
    assert store.prefetched == [key(0), key(1), key(2), key(3)]
    record = store.held[key(0)]
    record.candidate = replace(record.candidate, **copies(Tier.DISK))
    run(re_encoder, clock, 40)
    assert len(store.prefetched) == 4
    run(re_encoder, clock, 40)
    assert store.prefetched[4:] == [key(0)]


def test_variants_without_reads_are_not_promoted() -> None:
    store, re_encoder, clock = make(fixed(placement=RankPlacement(0.5, 0.5, 0)))
    store.put(0, tier=Tier.DISK)
    run(re_encoder, clock, 50)
    assert store.prefetched == []


def test_the_thread_survives_errors_of_the_store() -> None:
    store = DictStore()
    store.put(0)
    store.down = True
    scanned = threading.Event()
    swapped = threading.Event()

    class Watched(DictStore):
        def all(self) -> Iterator[CatalogVariant]:
            scanned.set()
            return store.all()

        def swap(self, *args: object) -> bool:
            swapped.set()
            return store.swap(*args)  # type: ignore[arg-type]

        def read(self, key: VariantKey, identity: int) -> bytearray | None:
            return store.read(key, identity)

    pace = replace(PACE, scan_interval_s=1e-3, min_age_s=0)
    re_encoder = ReEncoder(cast("VariantAccess", Watched()), fixed(INT8), pace, time.monotonic)
    re_encoder.start()
    try:
        assert scanned.wait(LIMIT_S)
        store.down = False
        assert swapped.wait(LIMIT_S)  # it compiles
    finally:
        re_encoder.close()
    assert store.precision(0) == INT8


def test_an_allowance_passes_a_large_item_and_then_waits() -> None:
    allowance = Allowance(100, now=0)
    assert allowance.wait_s(0) == 0
    allowance.take(1000, 5)
    assert allowance.wait_s(5) == 10
    assert allowance.wait_s(15) == 0
    with pytest.raises(ValueError, match="bytes_per_s"):
        Allowance(0, 0)


def test_native_bytes() -> None:
    assert native_bytes(SHAPE, TOKENS) == NATIVE_BYTES
    assert native_bytes(replace(SHAPE, dtype="int3"), TOKENS) is None


# The real store


def put_for_real(store: Store, name: int) -> None:
    value = bfloat16(numbers(name))
    half = len(value) // 2
    sums = tuple(checksum(value[i * half : (i + 1) * half]) for i in range(2))
    info = VariantInfo(TOKENS, len(value), 0, Provenance(exact=True))
    incoming = store.puts.begin(
        NewVariant(key(name), info, Origin(), SHAPE, (half, half), FORMAT), Ack.DURABLE
    )
    assert isinstance(incoming, IncomingPut)
    with incoming:
        start = 0
        for view in incoming.views:
            view[:] = value[start : start + len(view)]
            start += len(view)
        assert incoming.commit(PutCompletion(sums, 1.0), Ack.DURABLE) is PutOutcome.STORED


def read_for_real(store: Store, name: int) -> np.ndarray:
    """Read a value as a client does. Return its decoded numbers."""
    (lease,) = opened = store.reads.open([key(name)])
    store.reads.note_opened(opened)
    assert isinstance(lease, ReadLease)
    store.reads.release([lease.id])
    held = next(one for one in store.variants.all() if one.key == key(name))
    value = store.variants.read(key(name), held.identity)
    assert value is not None
    start, layers = 0, []
    for part in held.parts:
        encoded = np.frombuffer(value, np.uint8)[start : start + part.num_bytes]
        start += part.num_bytes
        layers.append(widened(decode_part(encoded, SHAPE, TOKENS, held.info.precision)))
    return np.concatenate(layers)


def test_in_a_real_store_cold_variants_shrink_and_no_longer_serve_exact(tmp_path: Path) -> None:
    clock = ManualClock()
    store = Store(tmp_path, StoreOptions(4 << 20, 64 << 20, clock=clock))
    re_encoder = ReEncoder(store.variants, HaRagAssignment(shares=(0.25, 0.25, 0)), PACE, clock)
    try:
        for name in range(4):
            put_for_real(store, name)
        for name, times in ((0, 9), (1, 4)):
            for _ in range(times):
                read_for_real(store, name)
        store.mover.writer.flush()
        store.reads.note_lossy_reader()
        for _ in range(30):  # a variant whose write is pending is tried again
            run(re_encoder, clock, 10)
            store.mover.writer.flush()
        held = {one.key: one.info for one in store.variants.all()}
        assert [held[key(name)].precision for name in range(4)] == [
            HA_RAG_SCHEMES[0],
            HA_RAG_SCHEMES[1],
            HA_RAG_SCHEMES[3],
            HA_RAG_SCHEMES[3],
        ]
        assert store.reads.open([key(3)], exact=True) == [Miss.OTHER_PRECISION]
        for name in range(4):
            assert np.sqrt(np.mean((read_for_real(store, name) - numbers(name)) ** 2)) < 0.1
        for _ in range(500):
            read_for_real(store, 3)
        run(re_encoder, clock, 20)
        (found,) = store.reads.lookup([LookupKey.for_variant(key(3))]).variants
        assert found.stored[0].wants_higher_precision
        assert found.stored[0].info.precision == HA_RAG_SCHEMES[3]
    finally:
        store.close()
    reopened = Store(tmp_path, StoreOptions(4 << 20, 64 << 20, clock=clock))
    try:
        after = {one.key: one.info for one in reopened.variants.all()}
        assert after == held
        for name in range(4):
            assert np.sqrt(np.mean((read_for_real(reopened, name) - numbers(name)) ** 2)) < 0.1
    finally:
        reopened.close()


def test_in_a_real_store_hot_variants_are_promoted(tmp_path: Path) -> None:
    clock = ManualClock()
    store = Store(tmp_path, StoreOptions(4 << 20, 64 << 20, clock=clock))
    for name in range(4):
        put_for_real(store, name)
    store.close()
    store = Store(tmp_path, StoreOptions(4 << 20, 64 << 20, clock=clock))

    class Counted:
        """The store, but one variant counts as read."""

        def __getattr__(self, name: str) -> object:
            return getattr(store.variants, name)

        def all(self) -> Iterator[CatalogVariant]:
            for one in store.variants.all():
                yield replace(one, reads=5) if one.key == key(2) else one

    try:
        assert {one.tier for one in store.variants.all()} == {Tier.DISK}
        placement = RankPlacement(gpu_share=0, pinned_share=0, pageable_share=0.25)
        re_encoder = ReEncoder(Counted(), fixed(placement=placement), PACE, clock)  # type: ignore[arg-type]
        run(re_encoder, clock, 15)

        def tiers() -> dict[VariantKey, Tier]:
            return {one.key: one.tier for one in store.variants.all()}

        wait_until(lambda: tiers()[key(2)] is Tier.MEMORY)
        assert [tiers()[key(name)] for name in range(4)] == [
            Tier.DISK,
            Tier.DISK,
            Tier.MEMORY,
            Tier.DISK,
        ]
    finally:
        store.close()


class KeptStoreMachine(RuleBasedStateMachine):
    """Under random calls, precision never rises and every value stays intact."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.re_encoder, self.clock = make(
            HaRagAssignment(shares=(0.3, 0.2, 0.1)), replace(PACE, num_scans=1, min_age_s=0)
        )
        self.bytes: dict[int, int] = {}
        self.names = itertools.count()

    @rule(tier=st.sampled_from(Tier))
    def put(self, tier: Tier) -> None:
        name = next(self.names)
        self.store.put(name, tier=tier)
        self.bytes[name] = NATIVE_BYTES

    @precondition(lambda self: self.bytes)
    @rule(data=st.data(), times=st.integers(1, 50))
    def use(self, data: st.DataObject, times: int) -> None:
        self.store.use(data.draw(st.sampled_from(sorted(self.bytes))), times)

    @precondition(lambda self: self.bytes)
    @rule(data=st.data())
    def put_again(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.bytes)))
        self.store.put(name)
        self.bytes[name] = NATIVE_BYTES

    @precondition(lambda self: self.bytes)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.bytes)))
        del self.store.held[key(name)]
        del self.bytes[name]

    @rule(seconds=st.sampled_from((0.5, 10.0, 35.0)))
    def wait(self, seconds: float) -> None:
        run(self.re_encoder, self.clock, seconds)

    @invariant()
    def nothing_grows_and_nothing_is_garbled(self) -> None:
        for name, before in self.bytes.items():
            now = self.store.held[key(name)].candidate.info.num_bytes
            assert now <= before
            self.bytes[name] = now
            assert np.sqrt(np.mean((self.store.decoded(name) - numbers(name)) ** 2)) < 0.1


KeptStoreMachine.TestCase.settings = settings(
    max_examples=15, stateful_step_count=25, deadline=None
)
test_random_use = KeptStoreMachine.TestCase
