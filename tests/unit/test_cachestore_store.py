"""The store, on a real RocksDB: what put, get and delete promise, also against each other."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_cachestore.disk import Disk
from ragcache_cachestore.entry import Entry
from ragcache_cachestore.pieces import PIECE_BYTES, Pieces, checksum
from ragcache_cachestore.store import Found, Missing, Store
from ragcache_core.errors import InvalidInput, TooLarge, Unavailable
from ragcache_core.keys import VariantKey
from tests.cachestore_parts import MIB, TIMEOUT_S, info, key, opened, put, value


async def found(store: Store, variant: VariantKey) -> bytes | None:
    """The value of a variant; None for a miss."""
    answer = await store.get(variant)
    return b"".join(answer.pieces) if isinstance(answer, Found) else None


class SlowDisk(Disk):
    """Writes values only when let through."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.entered = threading.Event()
        self.gate = threading.Event()

    def write(self, key: VariantKey, entry: Entry, pieces: Pieces) -> None:
        self.entered.set()
        assert self.gate.wait(TIMEOUT_S)
        super().write(key, entry, pieces)


async def test_what_was_put_is_found(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        raw = value(2 * PIECE_BYTES + 1)
        assert await put(store, key(1), raw)
        assert await found(store, key(1)) == raw
        assert await store.get(key(2)) == Missing(corrupt=False)
        assert store.counters.misses == 1


async def test_a_value_moves_into_memory_when_it_is_used(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put(store, key(1), value(10))
    async with opened(tmp_path) as store:
        tiers = [answer.tier for answer in [await store.get(key(1)) for _ in range(2)]]  # type: ignore[union-attr]
        assert tiers == ["disk", "memory"]
        assert (store.counters.hits_disk, store.counters.hits_memory) == (1, 1)


async def test_memory_is_bounded_and_what_does_not_fit_is_on_disk(tmp_path: Path) -> None:
    async with opened(tmp_path, memory_bytes=25) as store:
        for number in range(4):
            await put(store, key(number), value(10, number))
        assert store.memory.used_bytes == 20
        assert [await found(store, key(n)) for n in range(4)] == [value(10, n) for n in range(4)]
        assert store.memory.used_bytes == 20


async def test_the_disk_is_bounded_and_the_least_recently_used_goes(tmp_path: Path) -> None:
    async with opened(tmp_path, disk_bytes=35) as store:
        for number in range(3):
            await put(store, key(number), value(10))
        await store.get(key(0))
        await put(store, key(3), value(10))
        assert [store.lookup(key(n)) is not None for n in range(4)] == [True, False, True, True]
    async with opened(tmp_path, disk_bytes=35) as store:  # gone for good, not just from the index
        assert [store.lookup(key(n)) is not None for n in range(4)] == [True, False, True, True]


async def test_a_smaller_limit_holds_from_the_start(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for number in range(4):
            await put(store, key(number), value(10))
    async with opened(tmp_path, disk_bytes=25) as store:
        assert [store.lookup(key(n)) is not None for n in range(4)] == [False, False, True, True]


async def test_a_value_larger_than_the_store_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path, disk_bytes=9) as store:
        with pytest.raises(TooLarge, match="more than the whole store"):
            await put(store, key(1), value(10))


async def test_the_first_value_of_a_key_stays(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        assert await put(store, key(1), b"first")
        assert not await put(store, key(1), b"second")
        assert not await put(store, key(1), b"inexact", exact=False)
        assert await found(store, key(1)) == b"first"


async def test_an_exact_value_replaces_one_that_is_not(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        assert await put(store, key(1), b"blended", exact=False)
        assert not await put(store, key(1), b"blended again", exact=False)
        assert await put(store, key(1), b"exact")
        assert await found(store, key(1)) == b"exact"
    async with opened(tmp_path) as store:
        assert await found(store, key(1)) == b"exact"
        held = store.lookup(key(1))
        assert held is not None
        assert held[0].info.provenance.exact


async def test_of_puts_at_once_one_is_stored(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        stored = await asyncio.gather(*(put(store, key(1), value(50, n)) for n in range(5)))
        assert stored.count(True) == 1
        assert await found(store, key(1)) == value(50, stored.index(True))


async def test_a_value_that_does_not_match_its_checksum_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        with store.put(key(1), info(3), checksum([b"abd"]), 1) as arrival:
            arrival.add(b"abc")
            with pytest.raises(InvalidInput, match="checksum"):
                await arrival.finish()
        assert store.lookup(key(1)) is None
        assert await put(store, key(1), b"abc")


async def test_a_put_left_halfway_leaves_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        with store.put(key(1), info(10), 0, 1) as arrival:
            arrival.add(b"half")
        assert store.lookup(key(1)) is None
        assert await put(store, key(1), value(10))


async def test_what_arrives_at_once_is_bounded(tmp_path: Path) -> None:
    store = Store(Disk(tmp_path), 0, 256 * MIB, puts_bytes=10)
    with store.put(key(1), info(6), 0, 1):
        with pytest.raises(Unavailable, match="too many values"):
            store.put(key(2), info(5), 0, 1)
        with store.put(key(3), info(4), 0, 1):
            pass
    assert await put(store, key(4), value(10))
    await store.close()


async def test_a_delete_removes_from_both_tiers_for_good(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for prefix in range(3):
            await put(store, key(1, prefix), b"one")
        await put(store, key(2), b"two")
        assert await store.delete([key(1).chunk], []) == 3
        assert await store.delete([], [key(2), key(3)]) == 1
        assert await found(store, key(1)) is None
    async with opened(tmp_path) as store:
        assert len(store.index) == 0


async def test_a_put_that_is_still_arriving_is_overtaken_by_a_delete(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        with store.put(key(1), info(3), checksum([b"abc"]), 1) as arrival:
            arrival.add(b"abc")
            await store.delete([key(1).chunk], [])
            assert not await arrival.finish()
        assert await found(store, key(1)) is None
        assert await put(store, key(1), b"new")


async def test_a_put_that_is_being_written_is_overtaken_by_a_delete(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path)
    async with opened(tmp_path, open_disk=lambda _: disk) as store:
        putting = asyncio.create_task(put(store, key(1), b"abc"))
        await asyncio.to_thread(disk.entered.wait, TIMEOUT_S)
        deleting = asyncio.create_task(store.delete([], [key(1)]))
        await asyncio.sleep(0)
        disk.gate.set()
        assert not await putting
        assert await deleting == 1
        assert await found(store, key(1)) is None
    async with opened(tmp_path) as store:
        assert len(store.index) == 0


async def test_a_put_that_begins_during_a_delete_is_overtaken_too(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path)
    async with opened(tmp_path, open_disk=lambda _: disk) as store:
        busy = asyncio.create_task(put(store, key(9), b"keeps the writer busy"))
        await asyncio.to_thread(disk.entered.wait, TIMEOUT_S)
        deleting = asyncio.create_task(store.delete([key(1).chunk], []))
        await asyncio.sleep(0)
        late = asyncio.create_task(put(store, key(1), b"abc"))
        other = asyncio.create_task(put(store, key(2), b"abc"))
        await asyncio.sleep(0)
        disk.gate.set()
        await deleting
        assert not await late
        assert await other
        assert await busy


async def test_a_put_whose_caller_left_while_it_was_written_is_in_the_books(
    tmp_path: Path,
) -> None:
    disk = SlowDisk(tmp_path)
    async with opened(tmp_path, open_disk=lambda _: disk) as store:
        putting = asyncio.create_task(put(store, key(1), b"abc"))
        await asyncio.to_thread(disk.entered.wait, TIMEOUT_S)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        disk.gate.set()
        assert not await put(store, key(1), b"abc")  # waits for the first, which was stored
        assert await found(store, key(1)) == b"abc"


async def test_a_refused_write_is_forgotten(tmp_path: Path) -> None:
    disk = Disk(tmp_path, free_bytes=lambda: 0)
    async with opened(tmp_path, open_disk=lambda _: disk) as store:
        with pytest.raises(Unavailable, match="disk is full"):
            await put(store, key(1), b"abc")
        assert store.lookup(key(1)) is None
        assert await store.delete([key(1).chunk], []) == 0


operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 3), st.integers(0, 2)),
        st.tuples(st.just("get"), st.integers(0, 3), st.integers(0, 2)),
        st.tuples(st.just("delete"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("restart"), st.just(0), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=12)
@given(operations)
def test_a_store_never_serves_what_was_not_put_or_was_deleted(
    steps: list[tuple[str, int, int]],
) -> None:
    async def shake(folder: Path) -> None:
        held: dict[VariantKey, bytes] = {}
        store = Store(Disk(folder), memory_bytes=60, disk_bytes=100)
        for slot, (name, chunk, prefix) in enumerate(steps):
            variant = key(chunk, prefix)
            if name == "put":
                raw = value(20 + chunk, slot)
                if await put(store, variant, raw):
                    held[variant] = raw
            elif name == "get":
                assert await found(store, variant) in (None, held.get(variant))
            elif name == "delete":
                await store.delete([variant.chunk], [])
                held = {k: v for k, v in held.items() if k.chunk != variant.chunk}
            else:
                await store.close()
                store = Store(Disk(folder), memory_bytes=60, disk_bytes=100)
            store.index.check()
            store.memory.check()
        for variant in [key(c, p) for c in range(4) for p in range(3)]:
            assert await found(store, variant) in (None, held.get(variant))
        assert store.counters.corrupt == 0
        await store.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(shake(Path(folder)))
