"""The store on real files: the promises of its calls, also when they run at the same time."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragcache_cachestore.state.leases import ReadLease
from ragcache_cachestore.state.store_state import MAX_CLOCK_SKEW_MS, StoreOptions
from ragcache_cachestore.store import Store
from ragcache_core.errors import InvalidInput, TooLarge, Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Codec, Miss, Origin, Precision, Tier
from ragcache_core.knowledge.node_change import NodeChange, StoredNode
from ragcache_core.plan.segments import plain_domain
from ragcache_core.storage.extents import Extent
from ragcache_core.store_api import (
    LEASE_S,
    MAX_VARIANTS,
    Ack,
    AsOf,
    Deletion,
    LookupKey,
    PutOutcome,
)
from tests.kit.clock import ManualClock, ManualTime
from tests.kit.store import (
    MIB,
    TIMEOUT_S,
    checksum,
    checksummed_parts,
    completion,
    fill,
    get,
    key,
    opened,
    put,
    value,
    variant,
)
from tests.kit.wait import wait_until

PAGE = 65536
LOSSY = Precision(Codec.INT8, Codec.INT8)


def lease_of(store: Store, variant: VariantKey) -> ReadLease:
    (lease,) = opened = store.reads.open([variant])
    store.reads.note_opened(opened)
    assert isinstance(lease, ReadLease)
    return lease


def bytes_of(store: Store, lease: ReadLease) -> bytes:
    raw = bytearray(lease.variant.info.num_bytes)
    if lease.on_disk:
        assert store.disk_tier.read_into(lease.copy.extents, [memoryview(raw)])
        return bytes(raw)
    return b"".join(store.memory_tier.views(lease.copy.extents))


def tier_of(store: Store, variant: VariantKey) -> Tier | None:
    (answer,) = store.reads.lookup([LookupKey.for_variant(variant)]).variants
    return answer.stored[0].tier if answer.stored else None


def deletion(*chunks: int) -> Deletion:
    return Deletion(id=b"", chunks=tuple(key(chunk).chunk for chunk in chunks))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with opened(tmp_path) as store:
        yield store


# Values in and out


@pytest.mark.parametrize("num_bytes", [1, PAGE, PAGE + 1, 3 * MIB + 17])
@pytest.mark.parametrize("num_parts", [1, 5])
def test_a_value_that_was_put_is_found(store: Store, num_bytes: int, num_parts: int) -> None:
    raw = value(num_bytes)
    assert put(store, key(1), raw, num_parts=num_parts) is PutOutcome.STORED
    assert get(store, key(1)) == raw
    assert get(store, key(2)) is Miss.NEVER_STORED


def test_a_value_is_not_visible_before_its_commit(store: Store) -> None:
    incoming = store.puts.begin(variant(key(1), b"abc"))
    assert not isinstance(incoming, PutOutcome)
    assert get(store, key(1)) is Miss.NEVER_STORED
    fill(incoming.views, b"abc")
    assert get(store, key(1)) is Miss.NEVER_STORED
    assert incoming.commit(completion(incoming.new, b"abc")) is PutOutcome.STORED
    assert get(store, key(1)) == b"abc"


def test_an_aborted_put_leaves_nothing(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store.puts.begin(variant(key(1), value(10))):  # type: ignore[union-attr]
        raise ZeroDivisionError
    assert get(store, key(1)) is Miss.NEVER_STORED
    assert store.stats().memory_bytes == 0
    assert put(store, key(1), value(10)) is PutOutcome.STORED


def test_a_checksum_mismatch_names_the_part(store: Store) -> None:
    raw = bytearray(value(1000))
    new = variant(key(1), bytes(raw), num_parts=4)
    right = completion(new, bytes(raw))
    raw[600] ^= 1
    incoming = store.puts.begin(new)
    assert not isinstance(incoming, PutOutcome)
    fill(incoming.views, bytes(raw))
    with pytest.raises(InvalidInput, match=r"completion.checksums\[2\]"):
        incoming.commit(right)
    assert store.stats().memory_bytes == 0


def test_a_value_is_not_replaced_by_an_equal_or_worse_one(store: Store) -> None:
    assert put(store, key(1), b"first") is PutOutcome.STORED
    assert put(store, key(1), b"second") is PutOutcome.ALREADY_STORED
    assert put(store, key(1), b"inexact", exact=False) is PutOutcome.ALREADY_STORED
    assert put(store, key(1), b"lossy", precision=LOSSY) is PutOutcome.ALREADY_STORED
    assert get(store, key(1)) == b"first"


@pytest.mark.parametrize("worse", [{"exact": False}, {"precision": LOSSY}])
def test_a_better_value_replaces_a_worse_one(tmp_path: Path, worse: dict[str, Any]) -> None:
    with opened(tmp_path) as store:
        assert put(store, key(1), b"worse", ack=Ack.DURABLE, **worse) is PutOutcome.STORED
        assert put(store, key(1), b"worse again", **worse) is PutOutcome.ALREADY_STORED
        assert put(store, key(1), b"better") is PutOutcome.STORED
        assert get(store, key(1)) == b"better"
    with opened(tmp_path) as store:
        assert get(store, key(1), exact=True) == b"better"


def test_a_variant_that_wants_higher_precision_is_replaced_by_more_bytes(store: Store) -> None:
    put(store, key(1), b"12345678", precision=LOSSY)
    assert put(store, key(1), b"1234567890", precision=LOSSY) is PutOutcome.ALREADY_STORED
    store.variants.set_wants_higher_precision(key(1), True)
    (found,) = store.reads.lookup([LookupKey.for_variant(key(1))]).variants
    assert found.stored[0].wants_higher_precision
    assert put(store, key(1), b"1234", precision=LOSSY) is PutOutcome.ALREADY_STORED
    assert put(store, key(1), b"1234567890", precision=LOSSY) is PutOutcome.STORED


def test_one_of_concurrent_puts_is_stored(store: Store) -> None:
    incoming_puts = [store.puts.begin(variant(key(1), value(50, n))) for n in range(5)]
    outcomes = []
    for n, incoming in enumerate(incoming_puts):
        assert not isinstance(incoming, PutOutcome)
        fill(incoming.views, value(50, n))
        outcomes.append(incoming.commit(completion(incoming.new, value(50, n))))
    assert outcomes == [PutOutcome.STORED] + [PutOutcome.ALREADY_STORED] * 4
    assert get(store, key(1)) == value(50, 0)


def test_reads_respect_exactness_and_domain(store: Store) -> None:
    put(store, key(1), b"approximate", exact=False)
    put(store, key(2), b"lossy", precision=LOSSY)
    put(store, key(3), b"private", origin=Origin(domain="acme"))
    assert get(store, key(1), exact=True) is Miss.APPROXIMATE
    assert get(store, key(2), exact=True) is Miss.OTHER_PRECISION
    assert get(store, key(3), domain="public") is Miss.OTHER_DOMAIN
    assert get(store, key(3), domain="acme") == b"private"
    wants = [LookupKey.for_variant(key(n)) for n in (1, 2, 3)]
    answers = store.reads.lookup(wants, exact=True, domain="public").variants
    assert [answer.miss for answer in answers] == [
        Miss.APPROXIMATE,
        Miss.OTHER_PRECISION,
        Miss.OTHER_DOMAIN,
    ]


def test_a_lookup_by_chunk_finds_every_variant(store: Store) -> None:
    before = (key(7).chunk, key(8).chunk)
    put(store, key(1, 1), value(100), origin=Origin(prefix_chunks=before))
    put(store, key(1, 2), value(200), exact=False)
    every, one, none = store.reads.lookup(
        [LookupKey(key(1).chunk), LookupKey.for_variant(key(1, 1)), LookupKey(key(9).chunk)]
    ).variants
    assert {held.key: held.prefix_chunks for held in every.stored} == {
        key(1, 1): before,
        key(1, 2): (),
    }
    assert one.stored[0].prefix_chunks == ()
    assert one.stored[0].load_s > 0
    assert none.miss is Miss.NEVER_STORED
    (exact,) = store.reads.lookup([LookupKey(key(1).chunk)], exact=True).variants
    assert [held.key for held in exact.stored] == [key(1, 1)]


def test_a_lookup_returns_the_variants_that_were_used_most(store: Store) -> None:
    number = MAX_VARIANTS + 20
    for n in range(number):
        put(store, key(1, n), value(10), origin=Origin(prefix_chunks=(key(7).chunk,)))
    used = [key(1, n) for n in range(0, number, 3)]
    for one in used:
        assert get(store, one) == value(10)
    named = key(1, 1)
    assert named not in used
    wants = [
        LookupKey(named.chunk),
        LookupKey(named.chunk, named.prefix, others=True),
        LookupKey(named.chunk, b"absent" + bytes(10), others=True),
        LookupKey(key(9).chunk, named.prefix, others=True),
    ]
    every, with_named, without, none = store.reads.lookup(wants).variants
    for answer in (every, with_named, without):
        assert len(answer.stored) == MAX_VARIANTS
        assert {one.key for one in answer.stored} > set(used)
        assert {one.prefix_chunks for one in answer.stored} == {(key(7).chunk,)}
    assert with_named.stored[0].key == named
    # Unused ones by the order of puts, the last first.
    assert named not in {one.key for one in every.stored}
    assert key(1, number - 1) in {one.key for one in every.stored}
    assert none.miss is Miss.NEVER_STORED


def test_variants_that_may_not_serve_displace_no_others(store: Store) -> None:
    for n in range(MAX_VARIANTS):
        put(store, key(1, n), value(10), exact=False)
    put(store, key(1, MAX_VARIANTS), value(10))
    for n in range(MAX_VARIANTS):
        get(store, key(1, n))
    [answer] = store.reads.lookup([LookupKey(key(1).chunk)], exact=True).variants
    assert [one.key for one in answer.stored] == [key(1, MAX_VARIANTS)]


def test_a_lookup_of_many_keys_keeps_their_order(store: Store) -> None:
    for n in range(0, 100, 2):
        put(store, key(n), value(10))
    answers = store.reads.lookup([LookupKey.for_variant(key(n)) for n in range(100)]).variants
    assert [[one.key for one in answer.stored] for answer in answers] == [
        [key(n)] if n % 2 == 0 else [] for n in range(100)
    ]


# Tiers


def test_memory_is_bounded_and_evicted_values_are_served_from_disk(tmp_path: Path) -> None:
    with opened(tmp_path, memory_bytes=4 * PAGE) as store:
        for number in range(10):
            put(store, key(number), value(PAGE, number))
            assert store.stats().memory_bytes <= 4 * PAGE
        store.mover.writer.flush()
        assert [get(store, key(n)) for n in range(10)] == [value(PAGE, n) for n in range(10)]
        assert store.stats().evictions[Tier.MEMORY] >= 6
        assert store.stats().hits_disk >= 6


def test_a_value_is_written_to_disk_once(tmp_path: Path) -> None:
    with opened(tmp_path, memory_bytes=2 * PAGE) as store:
        written = 0
        write = store.disk_tier.write

        def counted(extents: Sequence[Extent], views: Sequence[memoryview], *rest: Any) -> None:
            nonlocal written
            written += 1
            write(extents, views, *rest)

        store.disk_tier.write = counted  # type: ignore[method-assign,assignment]
        for number in range(4):
            put(store, key(number), value(PAGE, number))
        store.mover.writer.flush()
        for _ in range(3):
            for number in range(4):
                store.variants.prefetch([key(number)])
                wait_until(lambda n=number: tier_of(store, key(n)) is Tier.MEMORY)  # type: ignore[misc]
        assert written == 4


def test_the_disk_is_bounded_and_evicts_the_least_recently_used(tmp_path: Path) -> None:
    with opened(tmp_path, memory_bytes=PAGE, disk_bytes=40 * PAGE) as store:
        for number in range(38):
            put(store, key(number), value(PAGE), ack=Ack.DURABLE)
        get(store, key(0))
        for number in range(38, 42):
            put(store, key(number), value(PAGE), ack=Ack.DURABLE)
            assert store.stats().disk_bytes <= 40 * PAGE
        store.housekeeping.sweep()
        assert get(store, key(1)) is Miss.EVICTED
        held = [n for n in range(42) if tier_of(store, key(n)) is not None]
        assert {0, *range(38, 42)} <= set(held)
        assert len(held) <= 40
    with opened(tmp_path, memory_bytes=PAGE, disk_bytes=40 * PAGE) as store:
        assert [n for n in range(42) if tier_of(store, key(n)) is not None] == held


def test_a_sweep_above_the_high_watermark_evicts_down_to_the_low_one(tmp_path: Path) -> None:
    with opened(tmp_path, memory_bytes=100 * PAGE, disk_bytes=400 * PAGE) as store:
        store.sweeper.close()  # otherwise it would sweep before the values are on disk
        for number in range(96):
            put(store, key(number), value(PAGE, number))
        store.mover.writer.flush()
        store.housekeeping.sweep()
        assert store.stats().memory_bytes == 90 * PAGE
        assert len(store) == 96


def test_a_lower_capacity_holds_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for number in range(4):
            put(store, key(number), value(PAGE, number), ack=Ack.DURABLE)
    with opened(tmp_path, disk_bytes=2 * PAGE) as store:
        assert store.stats().disk_bytes <= 2 * PAGE
        for number in range(4):
            assert get(store, key(number)) in {value(PAGE, number), Miss.NEVER_STORED}


def test_values_larger_than_a_tier_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path, memory_bytes=4 * PAGE, disk_bytes=PAGE) as store:
        with pytest.raises(TooLarge, match="RAGCACHE_MEMORY_BYTES"):
            put(store, key(1), value(5 * PAGE))
        with pytest.raises(TooLarge, match="RAGCACHE_DISK_BYTES"):
            put(store, key(1), value(2 * PAGE), ack=Ack.DURABLE)
        assert put(store, key(1), value(2 * PAGE)) is PutOutcome.STORED
        assert get(store, key(1)) == value(2 * PAGE)


def test_a_value_read_from_disk_is_promoted(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, key(1), value(1000))
    with opened(tmp_path) as store:
        assert tier_of(store, key(1)) is Tier.DISK
        assert get(store, key(1)) == value(1000)
        wait_until(lambda: tier_of(store, key(1)) is Tier.MEMORY)
        assert get(store, key(1)) == value(1000)
        assert (store.stats().hits_disk, store.stats().hits_memory) == (1, 1)


def test_a_prefetch_promotes_values(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, key(1), value(1000))
    with opened(tmp_path) as store:
        assert store.variants.prefetch([key(1), key(1), key(2)]) == 1
        wait_until(lambda: tier_of(store, key(1)) is Tier.MEMORY)
        assert store.variants.prefetch([key(1)]) == 0
        assert store.stats().hits_disk == 0


@pytest.mark.parametrize("hold_s", [0.0, 10.0])
def test_what_a_waiting_request_needs_stays_in_memory_until_its_hold_ends(
    tmp_path: Path, hold_s: float
) -> None:
    clock = ManualClock()
    with opened(tmp_path, memory_bytes=4 * PAGE, clock=clock) as store:

        def put_many(numbers: range) -> None:
            for number in numbers:
                put(store, key(number), value(PAGE, number), ack=Ack.DURABLE)

        put(store, key(1), value(PAGE, 1), ack=Ack.DURABLE)
        store.variants.prefetch([key(1)], hold_s)
        put_many(range(2, 12))
        assert tier_of(store, key(1)) is (Tier.MEMORY if hold_s else Tier.DISK)
        clock.now += hold_s
        put_many(range(12, 22))
        assert tier_of(store, key(1)) is Tier.DISK
        store.check()


def test_what_a_waiting_request_needs_stays_on_disk(tmp_path: Path) -> None:
    with opened(tmp_path, memory_bytes=2 * PAGE, disk_bytes=4 * PAGE) as store:
        put(store, key(1), value(PAGE, 1), ack=Ack.DURABLE)
        store.variants.prefetch([key(1)], hold_s=10.0)
        for number in range(2, 12):
            put(store, key(number), value(PAGE, number), ack=Ack.DURABLE)
        assert get(store, key(1)) == value(PAGE, 1)


def test_holds_take_half_of_a_tier_at_most(tmp_path: Path) -> None:
    with opened(tmp_path, memory_bytes=4 * PAGE) as store:
        numbers = range(1, 5)
        for number in numbers:
            put(store, key(number), value(PAGE, number), ack=Ack.DURABLE)
        store.variants.prefetch([key(number) for number in numbers], hold_s=10.0)
        with store.state.lock:
            assert store.state.holds.held_bytes == 2 * PAGE
        put(store, key(9), value(3 * PAGE, 9), ack=Ack.DURABLE)
        assert get(store, key(9)) == value(3 * PAGE, 9), "a value beyond the rest still fits"


def test_small_values_share_pages_in_both_tiers(tmp_path: Path) -> None:
    numbers = range(40)
    with opened(tmp_path, memory_bytes=8 * PAGE, disk_bytes=8 * PAGE) as store:
        for number in numbers:
            put(store, key(number), value(1500, number), ack=Ack.DURABLE)
        with store.state.lock:
            used = [tier.allocator.used_pages for tier in (store.state.memory, store.state.disk)]
        assert used == [3, 3]
    with opened(tmp_path, memory_bytes=8 * PAGE, disk_bytes=8 * PAGE) as store:
        with store.state.lock:
            assert store.state.disk.allocator.used_pages == 3
        assert [get(store, key(number)) for number in numbers] == [
            value(1500, number) for number in numbers
        ]
        store.check()


def test_a_small_value_is_evicted_for_another_one_in_a_full_store(tmp_path: Path) -> None:
    with opened(tmp_path, memory_bytes=PAGE, disk_bytes=PAGE) as store:
        for number in range(60):
            put(store, key(number), value(3000, number), ack=Ack.DURABLE)
            assert get(store, key(number)) == value(3000, number)
            store.check()
        with store.state.lock:
            assert store.state.disk.allocator.used_pages == 1


def test_small_values_are_read_whole_while_others_in_their_pages_change(tmp_path: Path) -> None:
    with opened(tmp_path, memory_bytes=4 * PAGE, disk_bytes=4 * PAGE) as store:
        for number in range(8):
            put(store, key(number), value(2000, number), ack=Ack.DURABLE)
        read: list[object] = []

        def reader() -> None:
            for turn in range(200):
                read.append(get(store, key(turn % 4)) == value(2000, turn % 4))

        threads = [threading.Thread(target=reader) for _ in range(2)]
        for thread in threads:
            thread.start()
        for turn in range(200):
            number = 4 + turn % 4
            put(store, key(number), value(500 + 7 * turn, number), ack=Ack.DURABLE)
        for thread in threads:
            thread.join()
        assert read == [True] * 400
        store.check()


def test_second_touch_admission_writes_only_values_read_again(tmp_path: Path) -> None:
    with opened(tmp_path, admission="second-touch") as store:
        put(store, key(1), value(100))
        put(store, key(2), value(100))
        put(store, key(3), value(100), ack=Ack.DURABLE)
        get(store, key(1))
        store.mover.writer.flush()
    with opened(tmp_path) as store:
        assert [get(store, key(n)) for n in (1, 2, 3)] == [
            value(100),
            Miss.NEVER_STORED,
            value(100),
        ]


def test_a_parent_outlives_its_children_in_memory(tmp_path: Path) -> None:
    with opened(tmp_path, memory_bytes=4 * PAGE, leaves_only=True) as store:
        put(store, key(1), value(PAGE, 1))
        put(store, key(2), value(PAGE, 2), origin=Origin(parent=key(1)))
        put(store, key(3), value(PAGE, 3), origin=Origin(parent=key(2)))
        store.mover.writer.flush()
        for number in range(10, 13):
            put(store, key(number), value(PAGE, number))
            store.mover.writer.flush()
            where = [tier_of(store, key(n)) for n in (1, 2, 3)]
            assert where == sorted(where, key=lambda tier: tier is Tier.DISK)
        assert tier_of(store, key(3)) is Tier.DISK


def test_a_child_is_promoted_after_its_parents(tmp_path: Path) -> None:
    with opened(tmp_path, leaves_only=True) as store:
        put(store, key(1), value(100, 1))
        put(store, key(2), value(100, 2), origin=Origin(parent=key(1)))
        put(store, key(3), value(100, 3), origin=Origin(parent=key(2)))
    with opened(tmp_path, leaves_only=True) as store:
        begin = store.sequence
        store.variants.prefetch([key(3)])
        wait_until(lambda: tier_of(store, key(3)) is Tier.MEMORY)
        moved = [change.key for change in store.changes_after(begin, 1000) or []]
        assert moved == [key(1), key(2), key(3)]


# Leases


def test_a_leased_value_is_neither_evicted_nor_overwritten(tmp_path: Path) -> None:
    with opened(tmp_path, memory_bytes=4 * PAGE) as store:
        put(store, key(1), value(PAGE, 1))
        lease = lease_of(store, key(1))
        for number in range(10, 30):
            put(store, key(number), value(PAGE, number))
        assert bytes_of(store, lease) == value(PAGE, 1)
        assert tier_of(store, key(1)) is Tier.MEMORY
        store.reads.release([lease.id])
        for number in range(30, 40):
            put(store, key(number), value(PAGE, number))
        assert tier_of(store, key(1)) is Tier.DISK


def test_a_deleted_value_keeps_its_bytes_while_it_is_leased(tmp_path: Path) -> None:
    with opened(tmp_path, memory_bytes=2 * PAGE, disk_bytes=2 * PAGE) as store:
        put(store, key(1), value(PAGE, 1), ack=Ack.DURABLE)
        put(store, key(2), value(PAGE, 2), ack=Ack.DURABLE)
        in_memory = lease_of(store, key(1))
        store.deletes.apply([deletion(1)])
        assert get(store, key(1)) is Miss.DELETED
        assert store.stats().memory_bytes == 2 * PAGE
        put(store, key(3), value(PAGE, 3))
        assert bytes_of(store, in_memory) == value(PAGE, 1)
        store.reads.release([in_memory.id])
        assert put(store, key(4), value(PAGE, 4)) is PutOutcome.STORED


def test_a_value_leased_on_disk_keeps_its_extents(tmp_path: Path) -> None:
    with opened(tmp_path, disk_bytes=2 * PAGE) as store:
        put(store, key(1), value(PAGE, 1), ack=Ack.DURABLE)
    with opened(tmp_path, memory_bytes=PAGE, disk_bytes=2 * PAGE) as store:
        put(store, key(9), value(PAGE, 9))  # memory is full, so no value is promoted
        store.mover.writer.flush()
        lease = lease_of(store, key(1))
        assert lease.on_disk
        store.deletes.apply([deletion(1)])
        for number in range(2, 6):
            put(store, key(number), value(PAGE, number))
            store.mover.writer.flush()
        assert bytes_of(store, lease) == value(PAGE, 1)
        assert store.stats().disk_bytes == 2 * PAGE
        store.reads.release([lease.id])
        store.housekeeping.sweep()
        assert store.stats().disk_bytes <= PAGE


def test_a_lease_expires(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    with opened(tmp_path, memory_bytes=PAGE, clock=clock) as store:
        put(store, key(1), value(PAGE, 1))
        lease = lease_of(store, key(1))
        store.mover.writer.flush()
        clock.now += LEASE_S - 1
        assert store.reads.is_leased(lease.id)
        clock.now += 2
        assert not store.reads.is_leased(lease.id)
        assert put(store, key(2), value(PAGE, 2)) is PutOutcome.STORED
        store.reads.release([lease.id])  # it has expired, so this has no effect
        assert get(store, key(2)) == value(PAGE, 2)


def test_a_put_is_unavailable_while_all_memory_is_leased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache_cachestore.background.tier_mover.ALLOCATE_TIMEOUT_S", 0.0)
    with opened(tmp_path, memory_bytes=2 * PAGE) as store:
        put(store, key(1), value(2 * PAGE))
        lease = lease_of(store, key(1))
        with pytest.raises(Unavailable) as refused:
            put(store, key(2), value(PAGE))
        assert refused.value.retry_after_s > 0
        store.reads.release([lease.id])
        store.mover.writer.flush()
        assert put(store, key(2), value(PAGE)) is PutOutcome.STORED


def test_incoming_bytes_are_bounded(tmp_path: Path) -> None:
    with opened(tmp_path, memory_bytes=8 * PAGE) as store:
        first = store.puts.begin(variant(key(1), value(3 * PAGE)))
        with pytest.raises(Unavailable, match="arriving"):
            store.puts.begin(variant(key(2), value(2 * PAGE)))
        second = store.puts.begin(variant(key(2), value(PAGE)))
        assert not isinstance(first, PutOutcome)
        assert not isinstance(second, PutOutcome)
        first.abort()
        second.abort()
        assert put(store, key(3), value(8 * PAGE)) is PutOutcome.STORED


def test_the_pages_of_an_aborted_put_may_be_quarantined(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    with opened(tmp_path, memory_bytes=2 * PAGE, clock=clock) as store:
        incoming = store.puts.begin(variant(key(1), value(PAGE)))
        assert not isinstance(incoming, PutOutcome)
        incoming.abort(quarantine_s=LEASE_S)
        assert store.stats().memory_bytes == PAGE
        put(store, key(2), value(PAGE, 2))
        fill(store.memory_tier.views(incoming.extents), value(PAGE))
        assert get(store, key(2)) == value(PAGE, 2)
        clock.now += LEASE_S
        store.housekeeping.sweep()
        assert store.stats().memory_bytes == PAGE


# Durability


def test_a_durable_put_survives_a_kill_and_an_accepted_one_a_close(tmp_path: Path) -> None:
    with opened(tmp_path, flush=False) as store:
        assert put(store, key(1), value(100, 1), ack=Ack.DURABLE) is PutOutcome.STORED
    with opened(tmp_path) as store:
        assert get(store, key(1)) == value(100, 1)
        put(store, key(2), value(100, 2))
    with opened(tmp_path) as store:
        assert get(store, key(2)) == value(100, 2)


def test_a_durable_put_of_a_stored_value_waits_for_its_write(tmp_path: Path) -> None:
    with opened(tmp_path, admission="second-touch", flush=False) as store:
        put(store, key(1), value(100))
        assert put(store, key(1), value(100), ack=Ack.DURABLE) is PutOutcome.ALREADY_STORED
    with opened(tmp_path) as store:
        assert get(store, key(1)) == value(100)


def test_a_durable_put_that_is_replaced_waits_for_the_new_value(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, flush=False) as store:
        entered, gate, write = threading.Event(), threading.Event(), store.disk_tier.write

        def slow(extents: Sequence[Extent], views: Sequence[memoryview], *rest: Any) -> None:
            entered.set()
            assert gate.wait(TIMEOUT_S)
            write(extents, views, *rest)

        store.disk_tier.write = slow  # type: ignore[method-assign,assignment]
        outcomes: list[PutOutcome] = []
        putting = threading.Thread(
            target=lambda: outcomes.append(
                put(store, key(1), b"worse", ack=Ack.DURABLE, exact=False)
            )
        )
        putting.start()
        assert entered.wait(TIMEOUT_S)
        assert put(store, key(1), b"better") is PutOutcome.STORED
        gate.set()
        putting.join(TIMEOUT_S)
        assert outcomes == [PutOutcome.STORED]
    with opened(tmp_path) as store:
        assert get(store, key(1)) == b"better"


def test_a_replaced_value_stays_on_disk_until_the_new_one_is_written(tmp_path: Path) -> None:
    with opened(tmp_path, flush=False) as store:
        put(store, key(1), b"worse", ack=Ack.DURABLE, exact=False)
        gate, write = threading.Event(), store.disk_tier.write

        def slow(extents: Sequence[Extent], views: Sequence[memoryview], *rest: Any) -> None:
            assert gate.wait(TIMEOUT_S)
            write(extents, views, *rest)

        store.disk_tier.write = slow  # type: ignore[method-assign,assignment]
        assert put(store, key(1), b"better") is PutOutcome.STORED
        assert get(store, key(1)) == b"better"
        for number in range(2, 20):  # no other value gets the extents of the old one
            put(store, key(number), value(PAGE, number))
        copied = tmp_path.parent / "as-if-killed"
        shutil.copytree(tmp_path, copied)
        gate.set()
    with opened(copied) as store:
        assert get(store, key(1)) == b"worse"


def test_on_a_full_disk_puts_are_accepted_and_durable_ones_refused(tmp_path: Path) -> None:
    free = 0
    with opened(tmp_path, free_bytes=lambda: free) as store:
        assert put(store, key(1), value(1000)) is PutOutcome.STORED
        with pytest.raises(Unavailable, match="disk is full"):
            put(store, key(2), value(1000), ack=Ack.DURABLE)
        store.mover.writer.flush()
        assert get(store, key(1)) == value(1000)
        assert get(store, key(2)) == value(1000)  # accepted, but not durable
        free = 1 << 40
        assert put(store, key(2), value(1000), ack=Ack.DURABLE) is PutOutcome.ALREADY_STORED
    with opened(tmp_path) as store:
        assert get(store, key(2)) == value(1000)


def test_a_corrupt_value_on_disk_is_dropped_on_report(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, key(1), value(3000))
        put(store, key(2), value(3000, 2))
        store.mover.writer.flush()
    with opened(tmp_path, memory_bytes=PAGE) as store:
        put(store, key(3), value(10))
        busy = lease_of(store, key(3))  # memory is full, so no value is promoted
        lease = lease_of(store, key(1))
        assert lease.on_disk
        store.reads.release([lease.id], corrupt=[lease.id])  # the copy is intact
        assert store.stats().corrupt == 0
        lease = lease_of(store, key(1))
        os.pwrite(store.disk_tier.fd, b"rot", lease.copy.extents[0].offset + 1000)
        store.reads.release([lease.id], corrupt=[lease.id])
        assert store.stats().corrupt == 1
        assert get(store, key(1)) is Miss.CORRUPT
        assert get(store, key(2)) == value(3000, 2)
        store.reads.release([busy.id])
        assert put(store, key(1), value(3000)) is PutOutcome.STORED


def test_a_corrupt_value_is_not_promoted(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, key(1), value(3000))
        store.mover.writer.flush()
    with opened(tmp_path) as store:
        lease = lease_of(store, key(1))
        os.pwrite(store.disk_tier.fd, b"rot", lease.copy.extents[0].offset)
        store.reads.release([lease.id])
        store.variants.prefetch([key(1)])
        wait_until(lambda: tier_of(store, key(1)) is not Tier.DISK)
        # The read above may have promoted it before the corruption.
        assert get(store, key(1)) in {Miss.CORRUPT, value(3000)}


def test_a_corrupt_copy_in_memory_is_replaced_by_the_one_on_disk(store: Store) -> None:
    put(store, key(1), value(3000), ack=Ack.DURABLE)
    first, second = (lease_of(store, key(1)) for _ in range(2))
    assert first.copy is second.copy
    store.memory_tier.views(first.copy.extents)[0][:3] = b"rot"
    for lease in (first, second):  # both see the same copy, which is dropped once
        store.reads.release([lease.id], corrupt=[lease.id])
        assert store.stats().corrupt == 1
    assert get(store, key(1)) == value(3000)


# Deletes


def test_a_delete_removes_a_chunk_and_every_variant_after_it(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, key(1), b"one")
        put(store, key(1, 5), b"one elsewhere")
        put(store, key(2), b"after one", origin=Origin(prefix_chunks=(key(1).chunk,)))
        put(store, key(3), b"three")
        assert store.deletes.apply([deletion(1)]) == 3
        assert [get(store, key(n)) for n in (1, 2, 3)] == [Miss.DELETED, Miss.DELETED, b"three"]
    with opened(tmp_path) as store:
        assert [get(store, key(n)) for n in (2, 3)] == [Miss.NEVER_STORED, b"three"]
        assert get(store, key(1)) is Miss.DELETED


def test_deletes_by_variant_document_and_domain(store: Store) -> None:
    for number in range(4):
        domain, document = ("acme", "public")[number // 2], f"doc{number % 2}"
        put(store, key(number), b"x", origin=Origin(domain=domain, document=document))
    put(store, key(9, 1), b"x")
    put(store, key(9, 2), b"x")
    assert store.deletes.apply([Deletion(id=b"", variants=(key(9, 1),))]) == 1
    assert store.deletes.apply([Deletion(id=b"", documents=("doc0",), domain="public")]) == 1
    assert store.deletes.apply([Deletion(id=b"", domain="acme")]) == 2
    assert [n for n in range(4) if tier_of(store, key(n))] == [3]
    assert tier_of(store, key(9, 2)) is not None


def test_a_deletion_is_applied_once(tmp_path: Path) -> None:
    once = Deletion(id=bytes(16), chunks=(key(1).chunk,))
    with opened(tmp_path) as store:
        put(store, key(1), b"x")
        assert store.deletes.apply([once]) == 1
        put(store, key(1), b"x")
        assert store.deletes.apply([once]) == 0
        assert get(store, key(1)) == b"x"
    with opened(tmp_path) as store:
        assert store.deletes.apply([once]) == 0
        assert get(store, key(1)) == b"x"


def test_a_put_planned_before_a_delete_is_refused(store: Store) -> None:
    put(store, key(7), b"x")
    before = store.reads.lookup([]).as_of
    store.deletes.apply([deletion(1)])
    assert put(store, key(1), b"old plan", as_of=before) is PutOutcome.DELETED
    later = Origin(prefix_chunks=(key(1).chunk,))
    assert put(store, key(2), b"old plan", as_of=before, origin=later) is PutOutcome.DELETED
    assert put(store, key(3), b"another", as_of=before) is PutOutcome.STORED
    assert put(store, key(1), b"unknown", as_of=AsOf()) is PutOutcome.DELETED
    assert put(store, key(1), b"of another", as_of=AsOf(bytes(16), 99)) is PutOutcome.DELETED
    assert put(store, key(1), b"new") is PutOutcome.STORED


def test_a_delete_refuses_an_incoming_put(store: Store) -> None:
    incoming = store.puts.begin(variant(key(1), b"abc", as_of=store.reads.lookup([]).as_of))
    assert not isinstance(incoming, PutOutcome)
    fill(incoming.views, b"abc")
    store.deletes.apply([deletion(1)])
    assert incoming.commit(completion(incoming.new, b"abc")) is PutOutcome.DELETED
    assert get(store, key(1)) is Miss.DELETED
    assert store.stats().memory_bytes == 0


def test_a_delete_refuses_a_put_that_is_being_written(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        entered, gate, write = threading.Event(), threading.Event(), store.disk_tier.write

        def slow(extents: Sequence[Extent], views: Sequence[memoryview], *rest: Any) -> None:
            entered.set()
            assert gate.wait(TIMEOUT_S)
            write(extents, views, *rest)

        store.disk_tier.write = slow  # type: ignore[method-assign,assignment]
        outcomes: list[PutOutcome] = []
        putting = threading.Thread(
            target=lambda: outcomes.append(put(store, key(1), b"abc", ack=Ack.DURABLE))
        )
        putting.start()
        assert entered.wait(TIMEOUT_S)
        assert store.deletes.apply([deletion(1)]) == 1
        gate.set()
        putting.join(TIMEOUT_S)
        assert outcomes == [PutOutcome.DELETED]
        store.mover.writer.flush()
        assert store.stats().disk_bytes == 0
    with opened(tmp_path) as store:
        assert len(store) == 0


def test_a_start_finishes_a_delete_that_was_killed(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, flush=False) as store:
        put(store, key(1), b"x", ack=Ack.DURABLE)
        put(store, key(2), b"y", ack=Ack.DURABLE)
        store.metadata.remove = lambda keys: None  # type: ignore[method-assign]
        store.deletes.apply([deletion(1)])
    with opened(tmp_path) as store:
        assert get(store, key(1)) is Miss.DELETED
        assert get(store, key(2)) == b"y"
        assert store.stats().disk_bytes == 1


def test_a_value_put_after_a_delete_survives_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, key(1), b"old")
        store.deletes.apply([deletion(1)])
        put(store, key(1), b"new")
    with opened(tmp_path) as store:
        assert get(store, key(1)) == b"new"
        assert put(store, key(1), b"old plan", as_of=AsOf()) is PutOutcome.DELETED


DAY_MS = 24 * 3600 * 1000


def test_deletes_are_listed_in_order_and_live_for_a_day(tmp_path: Path) -> None:
    at = ManualTime()
    with opened(tmp_path, **at.settings) as store:
        store.deletes.apply([deletion(1)])
        at.pass_ms(1000)
        store.deletes.apply([deletion(2)])
        future_ms = at.now_ms + 99
        store.deletes.apply([Deletion(b"", chunks=(key(3).chunk,), made_at_ms=future_ms)])
        listed = store.deletes.after(1)
        assert [d.chunks for d in listed.deletions] == [(key(2).chunk,), (key(3).chunk,)]
        assert [d.made_at_ms for d in listed.deletions] == [at.now_ms, at.now_ms]
        assert (listed.store, listed.sequence, listed.incomplete) == (store.store_id, 3, False)
        assert store.deletes.after(3) == replace(listed, deletions=())
    at.pass_ms(DAY_MS // 2)
    opened(tmp_path, **at.settings).__enter__().close()
    at.pass_ms(DAY_MS // 2 - 1)
    with opened(tmp_path, **at.settings) as store:
        assert store.stats().tombstones == 3
        store.deletes.forget()
        assert store.stats().tombstones == 2
        assert store.deletes.after(0).incomplete
        assert not store.deletes.after(1).incomplete
    with opened(tmp_path, **at.settings) as store:
        assert store.reads.lookup([]).as_of.sequence == 3
        assert store.deletes.after(0).incomplete
        assert len(store.deletes.after(1).deletions) == 2


def test_a_delete_of_days_ago_is_applied_and_remembered(tmp_path: Path) -> None:
    """A shard that was away for days may report it, and no other one may know it."""
    now_ms = 1_700_000_000_000
    with opened(tmp_path, wall_ms=lambda: now_ms) as store:
        put(store, key(1), b"x")
        old = now_ms - 3 * DAY_MS
        assert store.deletes.apply([Deletion(b"", chunks=(key(1).chunk,), made_at_ms=old)]) == 1
        assert get(store, key(1)) is Miss.DELETED
        store.deletes.forget()
        assert store.stats().tombstones == 1


def test_a_volume_from_a_backup_reports_that_deletes_may_be_missed(store: Store) -> None:
    store.deletes.apply([deletion(1)])
    assert store.deletes.after(7).incomplete


def test_a_puller_gets_many_deletes_in_batches(store: Store) -> None:
    store.deletes.apply([deletion(number) for number in range(600)])
    store.deletes.apply([deletion(*range(1000)), deletion(*range(1000)), deletion(1)])
    sequence, sizes = 0, []
    while (batch := store.deletes.after(sequence)).sequence > sequence:
        sequence = batch.sequence
        sizes.append(len(batch.deletions))
    assert sizes == [256, 256, 89, 2]
    assert sequence == 603


def test_above_the_bound_of_memory_the_oldest_deletes_are_forgotten(tmp_path: Path) -> None:
    with opened(tmp_path, max_tombstone_bytes=100_000) as store:
        put(store, key(5000), b"kept", ack=Ack.DURABLE)
        before = store.reads.lookup([]).as_of
        for first in range(0, 1000, 50):
            store.deletes.apply([deletion(number) for number in range(first, first + 50)])
        remembered = store.stats().tombstones
        assert 100 < remembered < 300
        forgotten = 1000 - remembered
        assert store.deletes.after(forgotten - 1).incomplete
        assert not store.deletes.after(forgotten).incomplete
        # A put that has not seen a forgotten delete is refused, also if that did not name it.
        assert put(store, key(0), b"old plan", as_of=before) is PutOutcome.DELETED
        assert put(store, key(7777), b"of another", as_of=before) is PutOutcome.DELETED
        assert put(store, key(7777), b"unknown", as_of=AsOf()) is PutOutcome.DELETED
        assert put(store, key(0), b"new plan") is PutOutcome.STORED
        assert get(store, key(5000)) == b"kept"
    with opened(tmp_path, max_tombstone_bytes=100_000) as store:
        assert store.stats().tombstones == remembered
        assert get(store, key(5000)) == b"kept", "put before the forgotten deletes, and not covered"
        assert get(store, key(0)) == b"new plan"
        assert put(store, key(8888), b"old plan", as_of=before) is PutOutcome.DELETED


def test_a_plan_from_before_a_forgotten_delete_is_refused(tmp_path: Path) -> None:
    at = ManualTime()
    with opened(tmp_path, **at.settings, max_tombstone_bytes=1) as store:
        early_ms = at.now_ms
        store.deletes.apply([deletion(1)])
        assert store.stats().tombstones == 0
        at.pass_ms(60_000)
        seen = store.reads.lookup([]).as_of  # looked up after the delete, for a plan made before it
        early, later = (replace(seen, planned_at_ms=ms) for ms in (early_ms, at.now_ms))
        assert put(store, key(1), b"planned before", as_of=early) is PutOutcome.DELETED
        assert put(store, key(1), b"planned after", as_of=later) is PutOutcome.STORED


def test_missed_deletes_drop_every_variant_and_refuse_earlier_puts(tmp_path: Path) -> None:
    with opened(tmp_path, flush=False) as store:
        for number in range(4):
            put(store, key(number), value(100, number), ack=Ack.DURABLE)
        before = store.reads.lookup([]).as_of
        incoming = store.puts.begin(variant(key(9), b"abc", as_of=before))
        assert not isinstance(incoming, PutOutcome)
        fill(incoming.views, b"abc")
        store.metadata.remove = lambda keys: None  # type: ignore[method-assign]
        assert store.deletes.drop_all() == 4
        assert get(store, key(1)) is Miss.EVICTED
        assert incoming.commit(completion(incoming.new, b"abc")) is PutOutcome.DELETED
        assert put(store, key(1), b"old plan", as_of=before) is PutOutcome.DELETED
        assert put(store, key(1), b"new plan", ack=Ack.DURABLE) is PutOutcome.STORED
        assert store.deletes.after(0).deletions == (), "the other shards have missed nothing"
    with opened(tmp_path) as store:  # killed before the metadata was removed
        assert [n for n in range(4) if tier_of(store, key(n))] == [1]


def test_positions_of_pulls_survive_a_restart(tmp_path: Path) -> None:
    one, other = bytes([1]) * 16, bytes([2]) * 16
    with opened(tmp_path, flush=False) as store:
        store.deletes.note_pulled(one, 5)
        store.deletes.note_pulled(other, 6)
        store.deletes.note_pulled(one, 7)
    with opened(tmp_path) as store:
        assert store.deletes.pull_positions() == {one: 7, other: 6}


def test_many_deletes_take_one_sync(store: Store) -> None:
    for number in range(4):
        put(store, key(number), b"x")
    known = Deletion(bytes([9]) * 16, chunks=(key(0).chunk,))
    assert store.deletes.apply([known]) == 1
    synced, sync = 0, store.metadata.sync

    def counted() -> None:
        nonlocal synced
        synced += 1
        sync()

    store.metadata.sync = counted  # type: ignore[method-assign]
    assert store.deletes.apply([known, deletion(1), deletion(2, 3), known]) == 3
    assert synced == 1
    assert store.deletes.apply([known]) == store.deletes.apply([]) == 0
    assert synced == 1
    assert store.reads.lookup([]).as_of.sequence == 3


def test_a_put_whose_plan_is_older_than_a_delete_is_refused(tmp_path: Path) -> None:
    at = ManualTime()
    with opened(tmp_path, **at.settings) as store:
        deleted_ms = at.now_ms
        store.deletes.apply([deletion(1)])
        at.pass_ms(1000)
        seen = store.reads.lookup([]).as_of  # looked up after the delete, for a plan made before it
        as_of = replace(seen, planned_at_ms=deleted_ms + 60_000)  # the gateway's clock is ahead
        assert put(store, key(1), b"x", as_of=as_of) is PutOutcome.DELETED
        at.pass_ms(MAX_CLOCK_SKEW_MS)
        for planned_at_ms, outcome in (
            (deleted_ms - 1, PutOutcome.DELETED),
            (deleted_ms + MAX_CLOCK_SKEW_MS - 1, PutOutcome.DELETED),
            (deleted_ms + MAX_CLOCK_SKEW_MS, PutOutcome.STORED),
        ):
            as_of = AsOf(seen.store, seen.sequence, planned_at_ms)
            assert put(store, key(1), b"x", as_of=as_of) is outcome
            assert put(store, key(2), b"y", as_of=as_of) is not PutOutcome.DELETED


def test_a_folder_that_was_away_for_a_day_starts_empty(tmp_path: Path) -> None:
    now_ms = 1_700_000_000_000
    with opened(tmp_path, wall_ms=lambda: now_ms) as store:
        put(store, key(1), b"x")
        store_id = store.store_id
    now_ms += 24 * 3600 * 1000 + 1
    with opened(tmp_path, wall_ms=lambda: now_ms) as store:
        assert len(store) == 0
        assert store.store_id == store_id
        assert store.stats().disk_bytes == 0


def test_a_delete_that_the_disk_refuses_changes_nothing(store: Store) -> None:
    put(store, key(1), b"x")

    def refuse(_: object) -> None:
        raise Unavailable("cachestore", "its disk refuses writes")

    store.metadata.put_tombstones = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(Unavailable):
        store.deletes.apply([deletion(1)])
    assert get(store, key(1)) == b"x"
    assert put(store, key(1), b"y", as_of=AsOf()) is PutOutcome.ALREADY_STORED


# Events, copies and swaps


def test_changes_are_numbered_and_say_where_a_variant_is(tmp_path: Path) -> None:
    with opened(tmp_path, memory_bytes=2 * PAGE) as store:
        assert store.sequence == 0
        assert list(store.node_batches()) == []
        woken = threading.Event()
        store.watch(woken.set)
        put(store, key(1), value(PAGE), exact=False)
        assert woken.is_set()
        put(store, key(1), value(PAGE))
        store.mover.writer.flush()
        put(store, key(2), value(2 * PAGE))
        store.deletes.apply([deletion(1)])
        store.unwatch(woken.set)
        changes = store.changes_after(0, 100)
        assert changes is not None
        assert [(change.key, change.tier) for change in changes] == [
            (key(1), "memory"),
            (key(1), "memory"),
            (key(1), "disk"),
            (key(2), "memory"),
            (key(1), ""),
        ]
        assert [change.node.exact for change in changes if change.node] == [False, *3 * [True]]
        assert store.changes_after(0, 2) == changes[:2]
        assert store.changes_after(5, 100) == []
        assert store.changes_after(6, 100) is None
        assert [[change.key for change in batch] for batch in store.node_batches()] == [[key(2)]]


def test_a_change_has_what_a_tree_of_nodes_needs(store: Store) -> None:
    origin = Origin((key(1).chunk,), parent=key(1), token_s=0.25, cost_s=9.0)
    put(store, key(2), b"two", origin=origin)
    ((change,),) = store.node_batches()
    assert change == NodeChange.stored(
        "memory",
        StoredNode(key(2), key(1), 256, 3, exact=True, cost_s=0.25 * 256),
    )
    assert store.changes_after(0, 1) == [change]


def test_variants_of_requests_without_a_plan_are_not_told(store: Store) -> None:
    put(store, key(1), b"one", origin=Origin(domain=plain_domain("salt")))
    assert store.sequence == 0
    assert list(store.node_batches()) == []


def test_lookups_tell_copies_until_the_variant_is_dropped(store: Store) -> None:
    put(store, key(1), b"x")
    store.variants.set_copies(key(1), ("b:1",))
    store.variants.set_copies(key(2), ("b:1",))
    (found,) = store.reads.lookup([LookupKey.for_variant(key(1))]).variants
    assert found.stored[0].copies == ("b:1",)
    assert store.deletes.discard(key(1))
    assert not store.deletes.discard(key(1))
    put(store, key(1), b"x")
    put(store, key(2), b"x")
    for answer in store.reads.lookup(
        [LookupKey.for_variant(key(1)), LookupKey.for_variant(key(2))]
    ).variants:
        assert answer.stored[0].copies == ()


def test_served_bytes_are_taken_once(store: Store) -> None:
    put(store, key(1), value(10))
    get(store, key(1))
    get(store, key(1))
    assert store.reads.take_served() == {key(1): 20}
    assert store.reads.take_served() == {}


def test_an_export_has_what_a_put_needs(store: Store, tmp_path: Path) -> None:
    origin = Origin((key(4).chunk,), key(4), "acme", "doc", 1.5)
    put(store, key(1), value(3000), origin=origin, num_parts=3)
    exported = store.variants.export(key(1))
    assert exported is not None
    new, outgoing = exported
    assert outgoing.raw == value(3000)
    without_cost = replace(origin, cost_s=0.0)  # the completion has the cost
    assert new == variant(key(1), value(3000), origin=without_cost, num_parts=3)
    assert outgoing.wait_for_parts(0, 0.0) == tuple(
        part.checksum for part in checksummed_parts(value(3000), 3)
    )
    assert outgoing.wait_until_final(0.0) == 1.5
    assert store.variants.export(key(2)) is None
    assert store.stats().hits_memory == 0


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_swap_changes_the_encoding_and_nothing_else(tmp_path: Path, on_disk: bool) -> None:
    with opened(tmp_path) as store:
        put(store, key(1), value(300_000), origin=Origin(cost_s=2.0), num_parts=2)
        if not on_disk:
            small = swapped(store)
    with opened(tmp_path) as store:
        if on_disk:
            small = swapped(store)
            assert tier_of(store, key(1)) is Tier.DISK
        assert get(store, key(1)) == small
        assert get(store, key(1), exact=True) is Miss.OTHER_PRECISION
    with opened(tmp_path) as store:
        assert get(store, key(1)) == small
        assert store.stats().disk_bytes == len(small)


def swapped(store: Store) -> bytes:
    """Swap key 1 for a lossy encoding. Return its bytes."""
    (candidate,) = store.variants.all()
    small = value(100_000, 7)
    views = [memoryview(small)[:40_000], memoryview(small)[40_000:]]
    parts = [*checksummed_parts(small[:40_000]), *checksummed_parts(small[40_000:])]
    store.mover.writer.flush()
    assert store.variants.read(key(1), candidate.identity) == value(300_000)
    assert store.variants.swap(key(1), candidate.identity, LOSSY, parts, views)
    # The identity has changed.
    assert not store.variants.swap(key(1), candidate.identity, LOSSY, parts, views)
    assert store.variants.read(key(1), candidate.identity) is None
    (after,) = store.variants.all()
    assert after.info.precision == LOSSY
    now = time.monotonic()
    assert after.score(now) > candidate.score(now)
    assert checksum(small[:40_000]) == after.parts[0].checksum
    return small


def test_a_leased_value_is_not_swapped(store: Store) -> None:
    put(store, key(1), value(100))
    store.mover.writer.flush()
    (candidate,) = store.variants.all()
    lease = lease_of(store, key(1))
    parts, views = checksummed_parts(b"small"), [memoryview(b"small")]
    assert not store.variants.swap(key(1), candidate.identity, LOSSY, parts, views)
    store.reads.release([lease.id])
    assert store.variants.swap(key(1), candidate.identity, LOSSY, parts, views)


# A disk that fails


def refuse(*_: object) -> None:
    raise Unavailable("cachestore", "its disk refuses writes")


def test_a_disk_that_refuses_removals_stops_evictions(tmp_path: Path) -> None:
    with opened(tmp_path, memory_bytes=2 * PAGE, disk_bytes=100 * PAGE) as store:
        store.sweeper.close()  # otherwise it would also sweep, at any time
        for number in range(95):
            put(store, key(number), value(PAGE, number), ack=Ack.DURABLE)
        remove = store.metadata.remove
        store.metadata.remove = refuse  # type: ignore[method-assign,assignment]
        put(store, key(99), value(PAGE, 99), ack=Ack.DURABLE)
        for _ in range(20):
            with pytest.raises(Unavailable):
                store.housekeeping.sweep()
        assert store.stats().evictions[Tier.DISK] <= 6  # one sweep down to the low watermark
        for number in range(100, 104):
            put(store, key(number), value(PAGE), ack=Ack.DURABLE)
        for number in range(104, 110):
            with pytest.raises(Unavailable):
                put(store, key(number), value(PAGE), ack=Ack.DURABLE)
        assert store.stats().evictions[Tier.DISK] <= 6
        store.metadata.remove = remove  # type: ignore[method-assign]
        store.housekeeping.sweep()
        assert store.stats().disk_bytes == 94 * PAGE


def test_a_store_starts_on_a_disk_that_refuses_removals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, flush=False) as store:
        put(store, key(1), b"x", ack=Ack.DURABLE)
        put(store, key(2), b"y", ack=Ack.DURABLE)
        store.metadata.remove = refuse  # type: ignore[method-assign,assignment]
        store.deletes.apply([deletion(1)])
    with monkeypatch.context() as patch:
        patch.setattr("ragcache_cachestore.storage.metadata_db.MetadataDb.remove", refuse)
        with opened(tmp_path) as store:
            assert get(store, key(1)) is Miss.DELETED
            assert get(store, key(2)) == b"y"


def test_a_delete_is_remembered_until_its_variants_are_off_the_disk(tmp_path: Path) -> None:
    at = ManualTime()
    with opened(tmp_path, **at.settings, flush=False) as store:
        put(store, key(1), b"x", ack=Ack.DURABLE)
        remove = store.metadata.remove
        store.metadata.remove = refuse  # type: ignore[method-assign,assignment]
        store.deletes.apply([deletion(1)])
        at.pass_ms(DAY_MS + 1)
        with pytest.raises(Unavailable):
            store.deletes.forget()
        assert store.stats().tombstones == 1
        store.metadata.remove = remove  # type: ignore[method-assign]
        store.deletes.forget()
        assert store.stats().tombstones == 0
        store.metadata.note_alive(at.now_ms)
    with opened(tmp_path, **at.settings) as store:
        assert len(store) == 0


def test_a_swap_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, memory_bytes=4 * PAGE) as store:
        put(store, key(1), value(PAGE), ack=Ack.DURABLE)
        (candidate,) = store.variants.all()
        write = store.disk_tier.write
        store.disk_tier.write = refuse  # type: ignore[method-assign,assignment]
        small = value(100, 7)
        assert not store.variants.swap(
            key(1), candidate.identity, LOSSY, checksummed_parts(small), [memoryview(small)]
        )
        assert get(store, key(1)) == value(PAGE)
        assert store.stats().memory_bytes == store.stats().disk_bytes == PAGE
        store.disk_tier.write = write  # type: ignore[method-assign]
        assert store.variants.swap(
            key(1), candidate.identity, LOSSY, checksummed_parts(small), [memoryview(small)]
        )
        assert (store.stats().memory_bytes, store.stats().disk_bytes) == (100, 100)
        assert tier_of(store, key(1)) is Tier.MEMORY


def test_a_durable_value_returns_if_its_replacement_is_never_written(tmp_path: Path) -> None:
    with opened(tmp_path, memory_bytes=4 * PAGE) as store:
        put(store, key(1), value(PAGE, 1), exact=False, ack=Ack.DURABLE)
        store.disk_tier.write = refuse  # type: ignore[method-assign,assignment]
        put(store, key(1), value(PAGE, 2))
        store.mover.writer.flush()
        assert get(store, key(1)) == value(PAGE, 2)
        for number in range(10, 20):
            put(store, key(number), value(PAGE, number))
            store.mover.writer.flush()
        assert get(store, key(1)) == value(PAGE, 1)
        assert get(store, key(1), exact=True) is Miss.APPROXIMATE
        store.check()
    with opened(tmp_path) as store:
        assert get(store, key(1)) == value(PAGE, 1)


def test_a_deleted_value_does_not_return_after_its_replacement(tmp_path: Path) -> None:
    with opened(tmp_path, memory_bytes=4 * PAGE) as store:
        old = Origin(domain="acme", document="old")
        put(store, key(1), value(PAGE, 1), exact=False, ack=Ack.DURABLE, origin=old)
        store.disk_tier.write = refuse  # type: ignore[method-assign,assignment]
        put(store, key(1), value(PAGE, 2), origin=Origin(domain="acme", document="new"))
        store.mover.writer.flush()
        store.deletes.apply([Deletion(b"", documents=("old",), domain="acme")])
        assert get(store, key(1)) == value(PAGE, 2)
        for number in range(10, 20):
            put(store, key(number), value(PAGE, number))
            store.mover.writer.flush()
        assert get(store, key(1)) is Miss.EVICTED
        store.check()
    with opened(tmp_path) as store:
        assert get(store, key(1)) in set(Miss)


def test_a_store_closes_while_its_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache_cachestore.store.FLUSH_TIMEOUT_S", 0.05)
    monkeypatch.setattr("ragcache_cachestore.background.tier_mover.JOIN_TIMEOUT_S", 0.05)
    store = Store(tmp_path, StoreOptions(4 * PAGE, 4 * PAGE))
    entered, gate = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        entered.set()
        assert gate.wait(TIMEOUT_S)

    store.disk_tier.write = hang  # type: ignore[method-assign,assignment]
    put(store, key(1), value(PAGE))
    assert entered.wait(TIMEOUT_S)
    store.close()
    os.fstat(store.disk_tier.fd)  # the descriptor stays open for the thread that hangs
    gate.set()
    wait_until(store.mover.close)
    store.resources.close()


# Parents and children


def test_a_parent_is_written_with_its_child(tmp_path: Path) -> None:
    with opened(
        tmp_path, memory_bytes=4 * PAGE, leaves_only=True, admission="second-touch"
    ) as store:
        put(store, key(1), value(PAGE, 1))
        put(store, key(2), value(PAGE, 2), origin=Origin(parent=key(1)), ack=Ack.DURABLE)
        store.mover.writer.flush()  # this writes the parent too
        for number in range(10, 20):
            put(store, key(number), value(PAGE, number))
        assert (tier_of(store, key(1)), tier_of(store, key(2))) == (Tier.DISK, Tier.DISK)


def test_a_parent_that_does_not_fit_on_disk_stays_in_memory(tmp_path: Path) -> None:
    with opened(tmp_path, memory_bytes=4 * PAGE, disk_bytes=PAGE, leaves_only=True) as store:
        put(store, key(1), value(2 * PAGE, 1))  # larger than the disk tier
        put(store, key(2), value(PAGE, 2), origin=Origin(parent=key(1)), ack=Ack.DURABLE)
        for number in range(10, 20):
            put(store, key(number), value(2 * PAGE, number))
        assert (tier_of(store, key(1)), tier_of(store, key(2))) == (Tier.MEMORY, Tier.DISK)


def test_a_promotion_does_not_evict_the_parent(tmp_path: Path) -> None:
    with opened(tmp_path, leaves_only=True) as store:
        put(store, key(1), value(PAGE, 1))
        put(store, key(2), value(PAGE, 2), origin=Origin(parent=key(1)))
    with opened(tmp_path, memory_bytes=PAGE, leaves_only=True) as store:
        store.variants.prefetch([key(1)])
        wait_until(lambda: tier_of(store, key(1)) is Tier.MEMORY)
        store.mover.promote(next(one for one in store.state.catalog if one.key == key(2)))
        assert (tier_of(store, key(1)), tier_of(store, key(2))) == (Tier.MEMORY, Tier.DISK)


def test_a_value_larger_than_the_disk_evicts_nothing_there(tmp_path: Path) -> None:
    with opened(tmp_path, memory_bytes=8 * PAGE, disk_bytes=2 * PAGE) as store:
        put(store, key(1), value(PAGE, 1), exact=False, ack=Ack.DURABLE)
        put(store, key(2), value(PAGE, 2), ack=Ack.DURABLE)
        put(store, key(1), value(3 * PAGE, 1))
        store.mover.writer.flush()
        assert Tier.DISK not in store.stats().evictions
        assert get(store, key(1)) == value(3 * PAGE, 1)
    with opened(tmp_path, disk_bytes=2 * PAGE) as store:
        assert get(store, key(1)) == value(PAGE, 1)
        assert get(store, key(2)) == value(PAGE, 2)


def test_a_variant_cannot_be_its_own_parent(store: Store) -> None:
    with pytest.raises(InvalidInput, match=r"origin\.parent"):
        put(store, key(1), b"x", origin=Origin(parent=key(1)))


def test_lookups_count_misses(store: Store) -> None:
    put(store, key(1), b"approximate", exact=False)
    store.reads.lookup(
        [LookupKey.for_variant(key(1)), LookupKey.for_variant(key(2)), LookupKey(key(3).chunk)]
    )
    assert store.stats().misses_by_reason == {"never_stored": 2}
    store.reads.lookup([LookupKey.for_variant(key(1))], exact=True)
    assert store.stats().misses_by_reason == {"never_stored": 2, "approximate": 1}
    assert store.stats().hits_memory == 0


def test_stats_count(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, key(1), value(1000), origin=Origin(cost_s=1.0))
        put(store, key(2), value(500), precision=LOSSY)
        get(store, key(1))
        get(store, key(3))
        get(store, key(2), exact=True)
        store.reads.note_sent(Tier.MEMORY, "socket", 1000, 0.001)
        store.deletes.apply([deletion(8)])
        lease_of(store, key(1))
        stats = store.stats()
        assert stats.variants == 2
        assert stats.memory_bytes == 1500
        assert stats.puts == 2
        assert stats.hits_memory == 2
        assert stats.misses_by_reason == {"never_stored": 1, "other_precision": 1}
        assert stats.bytes_by_precision == {"native": 1000, "int8": 500}
        assert stats.bytes_by_transport == {"socket": 1000}
        assert (stats.leases, stats.tombstones) == (1, 1)
        assert sum(stats.score_histogram) == 1


def test_many_threads_at_once(tmp_path: Path) -> None:
    """Each value identifies its key, so a reader notices a wrong value."""
    errors: list[BaseException] = []

    def work(store: Store, seed: int) -> None:
        try:
            for step in range(60):
                number = (seed * 7 + step * 5) % 12
                if step % 4 == 3:
                    store.deletes.apply([deletion(number)])
                elif step % 2:
                    put(store, key(number), value(PAGE + number, number))
                else:
                    assert get(store, key(number)) in {value(PAGE + number, number), *Miss}
        except BaseException as error:
            errors.append(error)

    # The values of all threads may arrive at once.
    with opened(tmp_path, memory_bytes=14 * PAGE, disk_bytes=16 * PAGE) as store:
        threads = [threading.Thread(target=work, args=(store, seed)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.mover.writer.flush()
        store.housekeeping.sweep()
        assert errors == []
    with opened(tmp_path, memory_bytes=14 * PAGE, disk_bytes=16 * PAGE) as store:
        for number in range(12):
            assert get(store, key(number)) in {value(PAGE + number, number), *Miss}
