"""Several real stores behind one client: whole, losing a shard, growing and shrinking."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ragcache_core.errors import Unavailable
from ragcache_core.keys import VariantKey
from ragcache_core.sharding import Rendezvous
from ragcache_wire.members import FixedMembers
from ragcache_wire.sharded_store import AsyncShardedStore, ShardedStore
from tests.cachestore_parts import MIB, TIMEOUT_S, Served, checksum, info, serving, value

TIMES_OUT_S = 0.3


class ChangingMembers:
    """Members that a test changes."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses

    def current(self) -> tuple[str, ...]:
        return self.addresses


def key(number: int) -> VariantKey:
    """Keys that differ in their first bytes, as hashes do."""
    return VariantKey(number.to_bytes(8, "little") + bytes(8), bytes(16))


KEYS = [key(number) for number in range(60)]


def put(store: ShardedStore, wanted: VariantKey, raw: bytes, timeout_s: float = TIMEOUT_S) -> bool:
    return store.put(wanted, info(len(raw)), memoryview(raw), checksum([raw]), 1, timeout_s)


def raw_of(wanted: VariantKey) -> bytes:
    return value(1000 + wanted.chunk[0], wanted.chunk[0])


def values(
    store: ShardedStore, keys: list[VariantKey], timeout_s: float = TIMEOUT_S
) -> list[object]:
    """What get gives, as bytes, in its order."""
    found = list(store.get(keys, timeout_s))
    assert [wanted for wanted, _ in found] == keys
    return [None if stored is None else bytes(stored.value) for _, stored in found]


def eventually(claim: Callable[[], bool]) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    while not claim():
        assert time.monotonic() < give_up
        time.sleep(0.02)


@contextmanager
def silent_peer() -> Iterator[str]:
    """Takes connections and never answers, as a frozen process or a lost node does."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[list[Served]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving(tmp_path / str(i), memory_bytes=MIB)) for i in range(3)]


@contextmanager
def opened(*addresses: str) -> Iterator[ShardedStore]:
    store = ShardedStore(FixedMembers(addresses))
    try:
        yield store
    finally:
        store.close()


def test_every_shard_holds_its_chunks_and_together_they_hold_all(shards: list[Served]) -> None:
    addresses = [shard.address for shard in shards]
    with opened(*addresses) as store:
        store.connect(TIMEOUT_S)
        assert all(put(store, wanted, raw_of(wanted)) for wanted in KEYS)
        assert not put(store, KEYS[0], raw_of(KEYS[0]))
        assert store.lookup(KEYS).keys() == set(KEYS)
        mixed = [KEYS[5], key(999), *reversed(KEYS), KEYS[5]]
        expected = [raw_of(wanted) if wanted in KEYS else None for wanted in mixed]
        assert values(store, mixed) == expected
    owners = Rendezvous(addresses).owners([wanted.chunk for wanted in KEYS])
    for shard in shards:
        own = {k for k, owner in zip(KEYS, owners, strict=True) if owner == shard.address}
        assert shard.client.lookup(KEYS).keys() == own != set()


def test_a_caller_that_stops_early_leaves_no_shard_reading(shards: list[Served]) -> None:
    with opened(*(shard.address for shard in shards)) as store:
        for wanted in KEYS[:12]:
            put(store, wanted, value(8 * MIB))
        reading = store.get(KEYS[:12], TIMEOUT_S)
        next(reading)
        reading.close()  # type: ignore[attr-defined]
        del reading
        eventually(lambda: all(not shard.service.gets.used_bytes for shard in shards))


def lost_among(shards: list[Served], lost: str) -> tuple[list[str], set[VariantKey]]:
    """Members with a lost one, and the keys that the others own."""
    addresses = [*(shard.address for shard in shards), lost]
    owners = Rendezvous(addresses).owners([wanted.chunk for wanted in KEYS])
    kept = {k for k, owner in zip(KEYS, owners, strict=True) if owner != lost}
    assert set() < kept < set(KEYS)
    return addresses, kept


@pytest.mark.parametrize("way", ["refuses", "silent"])
def test_a_lost_shard_is_misses_and_holds_up_nobody(shards: list[Served], way: str) -> None:
    with ExitStack() as stack:
        lost = "127.0.0.1:9" if way == "refuses" else stack.enter_context(silent_peer())
        addresses, kept = lost_among(shards, lost)
        store = stack.enter_context(opened(*addresses))
        for wanted in KEYS:
            if wanted in kept:
                put(store, wanted, raw_of(wanted))
        expected = [raw_of(wanted) if wanted in kept else None for wanted in KEYS]
        assert store.lookup(KEYS, TIMES_OUT_S).keys() == kept
        # Known to be lost now: not even its time is waited for.
        began = time.monotonic()
        assert store.lookup(KEYS).keys() == kept
        assert values(store, KEYS) == expected
        orphan = next(wanted for wanted in KEYS if wanted not in kept)
        with pytest.raises(Unavailable, match=lost):
            put(store, orphan, b"x")
        with pytest.raises(Unavailable, match=lost):
            store.lookup([orphan])
        with pytest.raises(Unavailable, match=lost):
            list(store.get([orphan], TIMEOUT_S))
        assert time.monotonic() - began < 5


def test_a_shard_that_falls_silent_takes_no_other_along(shards: list[Served]) -> None:
    with silent_peer() as lost:
        addresses, kept = lost_among(shards, lost)
        with opened(*addresses) as store:
            for wanted in kept:
                put(store, wanted, raw_of(wanted))
            found = values(store, KEYS, TIMES_OUT_S)
            first_lost = next(place for place, wanted in enumerate(KEYS) if wanted not in kept)
            assert found[:first_lost] == [raw_of(wanted) for wanted in KEYS[:first_lost]]
            expected = [raw_of(wanted) if wanted in kept else None for wanted in KEYS]
            assert values(store, KEYS) == expected


def test_a_lost_shard_that_comes_back_is_asked_again(
    tmp_path: Path, shards: list[Served], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    addresses, kept = lost_among(shards, f"127.0.0.1:{port}")
    orphan = next(wanted for wanted in KEYS if wanted not in kept)
    with opened(*addresses) as store:
        assert store.lookup(KEYS, TIMES_OUT_S) == {}
        with caplog.at_level("INFO"), serving(tmp_path / "late", port=port) as late:
            # Nobody needs to ask it in vain for that.
            eventually(lambda: "is back" in caplog.text)
            assert put(store, orphan, raw_of(orphan))
            assert late.client.lookup([orphan])


def test_a_shard_that_refuses_a_value_is_not_lost(tmp_path: Path, shards: list[Served]) -> None:
    full = False
    with serving(tmp_path / "full", free_bytes=lambda: 0 if full else 1 << 40) as refusing:
        addresses, kept = lost_among(shards, refusing.address)
        first, second, *_ = (wanted for wanted in KEYS if wanted not in kept)
        with opened(*addresses) as store:
            put(store, first, raw_of(first))
            full = True
            with pytest.raises(Unavailable, match="unavailable"):
                put(store, second, raw_of(second))
            assert store.lookup([first, *kept]).keys() == {first}
            assert values(store, [first]) == [raw_of(first)]


def test_an_only_shard_is_asked_every_time(tmp_path: Path) -> None:
    with opened("127.0.0.1:9") as store:
        for _ in range(2):
            with pytest.raises(Unavailable, match="unavailable: "):
                store.lookup(KEYS)
            with pytest.raises(Unavailable):
                list(store.get(KEYS, TIMEOUT_S))
            with pytest.raises(Unavailable):
                put(store, KEYS[0], b"x")
        store.connect(TIMEOUT_S)


def test_without_shards_everything_is_a_miss() -> None:
    with opened() as store:
        store.connect(TIMEOUT_S)
        assert store.lookup(KEYS) == {}
        assert values(store, KEYS) == [None] * len(KEYS)
        with pytest.raises(Unavailable, match="no shards"):
            put(store, KEYS[0], b"x")


def test_shards_may_come_and_go_under_load(shards: list[Served]) -> None:
    addresses = [shard.address for shard in shards]
    members = ChangingMembers(*addresses)
    store = ShardedStore(members)
    failures: list[BaseException] = []
    stop = threading.Event()

    def work() -> None:
        try:
            while not stop.is_set():
                put(store, KEYS[0], raw_of(KEYS[0]))
                store.lookup(KEYS)
                assert values(store, KEYS[:3])[0] in (None, raw_of(KEYS[0]))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for turn in range(60):
        members.addresses = tuple(addresses[: 1 + turn % 3])
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    store.close()
    assert failures == []


async def test_a_delete_reaches_every_shard_that_may_hold_the_chunk(tmp_path: Path) -> None:
    with serving(tmp_path / "a") as one, serving(tmp_path / "b") as other:
        members = ChangingMembers(one.address, other.address)
        store = AsyncShardedStore(members)
        for shard in (one, other):  # both owned it, at different times
            shard.client.put(KEYS[0], info(3), memoryview(b"abc"), checksum([b"abc"]), 1, TIMEOUT_S)
        stats = await store.stats()
        assert {address: reply and reply.variants for address, reply in stats.items()} == {
            one.address: 1,
            other.address: 1,
        }
        members.addresses = (one.address, other.address, "127.0.0.1:9")
        with pytest.raises(Unavailable, match="unavailable"):
            await store.delete_chunks([KEYS[0].chunk])
        assert not one.client.lookup(KEYS[:1])
        assert not other.client.lookup(KEYS[:1])
        with pytest.raises(Unavailable, match="a moment ago"):
            await store.delete_chunks([KEYS[0].chunk])
        assert (await store.stats())["127.0.0.1:9"] is None
        members.addresses = (one.address,)
        assert await store.delete_chunks([KEYS[0].chunk]) == 0
        assert (await store.stats()).keys() == {one.address}
        members.addresses = ()
        with pytest.raises(Unavailable, match="no shards"):
            await store.delete_chunks([KEYS[0].chunk])
        await store.close()
