"""One client of several real stores: complete, with a lost shard, growing and shrinking."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from harness.processes import CacheStore, free_port, launch_cachestore, wait_for_cachestore
from ragcache_core.cluster.sharding import RendezvousHash
from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, Origin
from ragcache_core.store_api import (
    AsOf,
    Deletion,
    LookupAnswer,
    LookupKey,
    PutOutcome,
    ReportedUses,
)
from ragcache_kv.store_client.async_sharded import AsyncShardedStore
from ragcache_kv.store_client.client import StoreClient
from ragcache_kv.store_client.shard import RETRY_S
from ragcache_kv.store_client.shard_router import ShardedLookup
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_kv.values.outgoing_value import IncompleteValue, OutgoingValue, ReadyValue
from ragcache_wire.watched.members import FixedMembers
from tests.kit.store import (
    MIB,
    TIMEOUT_S,
    ServedStore,
    get_value,
    put_value,
    serving,
    value,
    variant,
    whole,
)
from tests.kit.wait import wait_until

TIMES_OUT_S = 0.9


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
WANTS = [LookupKey.for_variant(wanted) for wanted in KEYS]


def put(
    store: ShardedStore, wanted: VariantKey, raw: bytes, timeout_s: float = TIMEOUT_S
) -> PutOutcome:
    new = variant(wanted, raw)
    return store.put(new, whole(new, raw), timeout_s)


def raw_of(wanted: VariantKey) -> bytes:
    return value(1000 + wanted.chunk[0], wanted.chunk[0])


def values(
    store: ShardedStore, keys: list[VariantKey], timeout_s: float = TIMEOUT_S
) -> list[object]:
    """Return the results of get in order, as bytes or a Miss."""
    found = list(store.get(keys, timeout_s))
    assert [wanted for wanted, _ in found] == keys
    return [stored if isinstance(stored, Miss) else bytes(stored.value) for _, stored in found]


def misses(answer: ShardedLookup) -> set[Miss | None]:
    """Return the reasons of the misses."""
    return {variants.miss for variants in answer.variants if not variants.stored}


def delete(addresses: Iterable[str], *keys: VariantKey) -> None:
    """Delete chunks on shards, as a gateway does."""
    chunks = tuple(one.chunk for one in keys)
    made = Deletion(os.urandom(16), chunks, made_at_ms=time.time_ns() // 1_000_000)
    for address in addresses:
        client = StoreClient(address)
        client.delete(made)
        client.close()


@contextmanager
def silent_peer() -> Iterator[str]:
    """Accepts connections and never answers, as a frozen process or a lost node does."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[list[ServedStore]]:
    with ExitStack() as stack:
        transports = (("shared", "socket"), ("socket",), ())
        yield [
            stack.enter_context(serving(tmp_path / str(i), transports=transports[i]))
            for i in range(3)
        ]


@contextmanager
def opened(*addresses: str) -> Iterator[ShardedStore]:
    store = ShardedStore(FixedMembers(addresses))
    try:
        yield store
    finally:
        store.close()


def test_every_shard_stores_its_own_chunks_and_together_all(shards: list[ServedStore]) -> None:
    addresses = [shard.address for shard in shards]
    with opened(*addresses) as store:
        store.connect(TIMEOUT_S)
        assert list(store.transports().values()) == ["shared", "socket", "grpc"]
        assert {put(store, wanted, raw_of(wanted)) for wanted in KEYS} == {PutOutcome.STORED}
        assert put(store, KEYS[0], raw_of(KEYS[0])) is PutOutcome.ALREADY_STORED
        answer = store.lookup(WANTS)
        assert [held.key for found in answer.variants for held in found.stored] == KEYS
        assert answer.as_of.keys() == set(addresses)
        mixed = [KEYS[5], key(999), *reversed(KEYS), KEYS[5]]
        expected = [raw_of(k) if k in KEYS else Miss.NEVER_STORED for k in mixed]
        assert values(store, mixed) == expected
    owners = RendezvousHash(addresses).owners([wanted.chunk for wanted in KEYS])
    for shard in shards:
        own = {k for k, owner in zip(KEYS, owners, strict=True) if owner == shard.address}
        found = shard.client.lookup(WANTS).variants
        assert {held.key for variants in found for held in variants.stored} == own != set()


def test_engines_with_a_shard_beside_each_share_one_pool(tmp_path: Path) -> None:
    """An engine sees the socket of the shard in its own pod alone."""
    with ExitStack() as stack:
        folders = [tmp_path / "0", tmp_path / "1"]
        transports = ("shared", "socket")
        shards = [
            stack.enter_context(serving(folder, transports=transports, owns_memory=True))
            for folder in folders
        ]
        addresses = [shard.address for shard in shards]
        engines = []
        for own, other in ((0, 1), (1, 0)):
            path = folders[other] / "transport.sock"
            hidden = path.rename(folders[other] / "in-another-pod")
            engine = stack.enter_context(opened(*addresses))
            engine.connect(TIMEOUT_S)
            hidden.rename(path)
            found = engine.transports()
            assert (found[addresses[own]], found[addresses[other]]) == ("shared", "socket")
            engines.append(engine)
        first, second = engines
        for wanted in KEYS:
            put(first, wanted, raw_of(wanted))
        assert values(second, KEYS) == [raw_of(wanted) for wanted in KEYS]
        owners = RendezvousHash(addresses).owners([wanted.chunk for wanted in KEYS])
        sizes = [
            sum(len(raw_of(k)) for k, owner in zip(KEYS, owners, strict=True) if owner == address)
            for address in addresses
        ]
        for shard, num_bytes in zip(shards, sizes, strict=True):
            # One engine wrote or read each value through shared memory, the other one over TCP.
            wanted_bytes = dict.fromkeys(transports, num_bytes)
            wait_until(
                lambda shard=shard, wanted_bytes=wanted_bytes: (  # type: ignore[misc]
                    dict(shard.store.stats().bytes_by_transport) == wanted_bytes
                )
            )
        # The pod of the first engine goes. Its share is lost, and no other value.
        left = stack.enter_context(opened(addresses[1]))
        assert values(left, KEYS) == [
            raw_of(wanted) if owner == addresses[1] else Miss.NEVER_STORED
            for wanted, owner in zip(KEYS, owners, strict=True)
        ]


def test_values_of_several_shards_land_where_the_caller_says(shards: list[ServedStore]) -> None:
    with opened(*(shard.address for shard in shards)) as store:
        for wanted in KEYS:
            put(store, wanted, raw_of(wanted))
        room: list[bytearray] = []

        def allocate(info: object) -> memoryview:
            room.append(bytearray(2000))
            return memoryview(room[-1])

        for wanted, stored in store.get(KEYS, TIMEOUT_S, allocate=allocate):
            assert not isinstance(stored, Miss)
            assert any(stored.value.obj is buffer for buffer in room)
            assert bytes(stored.value) == raw_of(wanted)


def test_a_caller_that_stops_early_leaves_no_shard_reading(shards: list[ServedStore]) -> None:
    with opened(*(shard.address for shard in shards)) as store:
        for wanted in KEYS[:12]:
            put(store, wanted, value(4 * MIB))
        reading = store.get(KEYS[:12], TIMEOUT_S)
        next(reading)
        reading.close()  # type: ignore[attr-defined]
        del reading
        wait_until(lambda: all(not shard.store.stats().leases for shard in shards))


def lost_among(shards: list[ServedStore], lost: str) -> tuple[list[str], set[VariantKey]]:
    """Return members with a lost one, and the keys that the others own."""
    addresses = [*(shard.address for shard in shards), lost]
    owners = RendezvousHash(addresses).owners([wanted.chunk for wanted in KEYS])
    kept = {k for k, owner in zip(KEYS, owners, strict=True) if owner != lost}
    assert set() < kept < set(KEYS)
    return addresses, kept


@pytest.mark.parametrize("way", ["refuses", "silent"])
def test_a_lost_shard_means_misses_and_delays_no_caller(
    shards: list[ServedStore], way: str
) -> None:
    with ExitStack() as stack:
        lost = "127.0.0.1:9" if way == "refuses" else stack.enter_context(silent_peer())
        addresses, kept = lost_among(shards, lost)
        store = stack.enter_context(opened(*addresses))
        for wanted in KEYS:
            if wanted in kept:
                put(store, wanted, raw_of(wanted))
        expected = [raw_of(wanted) if wanted in kept else Miss.LOST for wanted in KEYS]
        first = store.lookup(WANTS, TIMES_OUT_S)
        assert first.by_key().keys() == kept
        assert lost not in first.as_of
        # Known to be lost now: not even its time is waited for.
        began = time.monotonic()
        again = store.lookup(WANTS)
        assert again.by_key().keys() == kept
        assert misses(again) == {Miss.LOST}, "the next shard cannot say that it is nowhere"
        assert values(store, KEYS) == expected
        orphan = next(wanted for wanted in KEYS if wanted not in kept)
        with pytest.raises(Unavailable, match=lost):
            put(store, orphan, b"x")
        assert store.lookup([LookupKey.for_variant(orphan)]).variants[0].miss is Miss.LOST
        assert values(store, [orphan]) == [Miss.LOST]
        assert time.monotonic() - began < TIMEOUT_S


def test_a_shard_that_stops_answering_makes_no_other_lost(shards: list[ServedStore]) -> None:
    with silent_peer() as lost:
        addresses, kept = lost_among(shards, lost)
        with opened(*addresses) as store:
            for wanted in kept:
                put(store, wanted, raw_of(wanted))
            found = values(store, KEYS, TIMES_OUT_S)
            first_lost = next(i for i, wanted in enumerate(KEYS) if wanted not in kept)
            assert found[:first_lost] == [raw_of(wanted) for wanted in KEYS[:first_lost]]
            expected = [raw_of(wanted) if wanted in kept else Miss.LOST for wanted in KEYS]
            assert values(store, KEYS) == expected


def test_a_lost_shard_that_answers_again_is_used_again(
    tmp_path: Path, shards: list[ServedStore], caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    addresses, kept = lost_among(shards, f"127.0.0.1:{port}")
    orphan = next(wanted for wanted in KEYS if wanted not in kept)
    with opened(*addresses) as store:
        assert store.lookup(WANTS, TIMES_OUT_S).by_key() == {}
        with caplog.at_level("INFO"), serving(tmp_path / "again", port=port) as restarted:
            # No caller needs to fail for that.
            wait_until(lambda: "available again" in caplog.text)
            assert put(store, orphan, raw_of(orphan)) is PutOutcome.STORED
            assert restarted.client.lookup([LookupKey.for_variant(orphan)]).variants[0].stored


def test_a_short_timeout_does_not_make_a_shard_lost(
    shards: list[ServedStore], caplog: pytest.LogCaptureFixture
) -> None:
    with opened(*(shard.address for shard in shards)) as store:
        for wanted in KEYS:
            put(store, wanted, raw_of(wanted))
        store.lookup(WANTS)
        with suppress(Unavailable):
            list(store.get(KEYS, 1e-6))
        assert values(store, KEYS) == [raw_of(wanted) for wanted in KEYS]
        assert "lost, its chunks" not in caplog.text


def test_a_report_that_takes_too_long_makes_no_shard_lost(
    shards: list[ServedStore], caplog: pytest.LogCaptureFixture
) -> None:
    resume = threading.Event()
    with opened(*(shard.address for shard in shards)) as store, ExitStack() as ends:
        for wanted in KEYS:
            put(store, wanted, raw_of(wanted))
        for shard in shards:
            shard.service._brief.submit(resume.wait, TIMEOUT_S)
        ends.callback(resume.set)
        reports = [ReportedUses(wanted) for wanted in KEYS]
        assert store.report_uses(reports, RETRY_S) == 0
        assert store.lookup(WANTS).by_key().keys() == set(KEYS)
        assert values(store, KEYS) == [raw_of(wanted) for wanted in KEYS]
        assert "lost, its chunks" not in caplog.text
        resume.set()
        wait_until(lambda: store.report_uses(reports) == len(KEYS))


def test_a_shard_that_refuses_a_value_is_not_lost(shards: list[ServedStore]) -> None:
    addresses = [shard.address for shard in shards]
    with opened(*addresses) as store:
        for wanted in KEYS[:6]:
            put(store, wanted, raw_of(wanted))
            wrong = replace(variant(wanted, b"x"), key=replace(wanted, prefix=bytes([1]) * 16))
            sums = whole(wrong, b"x").wait_for_parts(0, 0.0)
            with pytest.raises(InvalidInput):
                store.put(wrong, ReadyValue(memoryview(b"y"), sums), TIMEOUT_S)
        assert store.lookup(WANTS[:6]).by_key().keys() == set(KEYS[:6])


def test_an_only_shard_is_asked_every_time() -> None:
    with opened("127.0.0.1:9") as store:
        for _ in range(2):
            with pytest.raises(Unavailable, match="unavailable: "):
                store.lookup(WANTS)
            with pytest.raises(Unavailable):
                list(store.get(KEYS, TIMEOUT_S))
            with pytest.raises(Unavailable):
                put(store, KEYS[0], b"x")
        store.connect(TIMEOUT_S)


def test_without_shards_everything_is_a_miss() -> None:
    with opened() as store:
        store.connect(TIMEOUT_S)
        assert [found.stored for found in store.lookup(WANTS).variants] == [()] * len(WANTS)
        assert values(store, KEYS) == [Miss.LOST] * len(KEYS)
        assert store.prefetch(KEYS) == 0
        with pytest.raises(Unavailable, match="no shards"):
            put(store, KEYS[0], b"x")


def test_shards_may_come_and_go_under_load(shards: list[ServedStore]) -> None:
    addresses = [shard.address for shard in shards]
    members = ChangingMembers(*addresses)
    store = ShardedStore(members)
    failures: list[BaseException] = []
    stop = threading.Event()

    def work() -> None:
        try:
            while not stop.is_set():
                put(store, KEYS[0], raw_of(KEYS[0]))
                store.lookup(WANTS, TIMEOUT_S)
                found = values(store, KEYS[:3])[0]
                assert isinstance(found, Miss) or found == raw_of(KEYS[0])
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


def test_a_prefetch_of_values_in_memory_starts_nothing(shards: list[ServedStore]) -> None:
    with opened(*(shard.address for shard in shards)) as store:
        for wanted in KEYS:
            put(store, wanted, raw_of(wanted))
        assert store.prefetch(KEYS) == 0, "all are in memory"


def test_a_put_that_was_planned_before_a_delete_leaves_nothing(shards: list[ServedStore]) -> None:
    with opened(*(shard.address for shard in shards)) as store:
        raw = raw_of(KEYS[0])
        new = variant(KEYS[0], raw)
        before = store.lookup(WANTS).as_of
        delete([shard.address for shard in shards], KEYS[0])
        put_ = [
            store.put(new, whole(new, raw), TIMEOUT_S, as_of=as_of)
            # Planned before it; without knowing of its shard; and after it.
            for as_of in (before, {}, store.lookup(WANTS).as_of)
        ]
        assert put_ == [PutOutcome.DELETED, PutOutcome.DELETED, PutOutcome.STORED]
        # What was computed after the chunk is as dead, on whichever shard.
        origin = Origin(prefix_chunks=(KEYS[0].chunk,))
        for wanted in KEYS[1:5]:
            outdated = replace(variant(wanted, raw), origin=origin)
            outcome = store.put(outdated, whole(outdated, raw), TIMEOUT_S, as_of=before)
            assert outcome is PutOutcome.DELETED


def test_an_incomplete_value_makes_no_shard_lost(shards: list[ServedStore]) -> None:
    class Never(OutgoingValue):
        def wait_for_parts(self, done: int, deadline: float) -> tuple[int, ...]:
            raise IncompleteValue("it does not come")

        def wait_until_final(self, deadline: float) -> float:
            raise AssertionError

    with opened(*(shard.address for shard in shards)) as store:
        for wanted in KEYS:
            with pytest.raises(IncompleteValue):
                store.put(variant(wanted, b"abc"), Never(memoryview(b"abc")), TIMEOUT_S)
        for wanted in KEYS:
            put(store, wanted, raw_of(wanted))


def test_a_put_without_a_known_lookup_is_stored_if_nothing_was_deleted(
    shards: list[ServedStore],
) -> None:
    with opened(shards[0].address) as store:
        raw = raw_of(KEYS[0])
        new = variant(KEYS[0], raw)
        assert store.put(new, whole(new, raw), TIMEOUT_S, as_of={}) is PutOutcome.STORED
        assert store.lookup(WANTS).as_of == {shards[0].address: AsOf(shards[0].store.store_id, 0)}


def replicated(
    shards: list[ServedStore], wanted: VariantKey, raw: bytes
) -> tuple[ServedStore, ServedStore]:
    """Put on the owner and, as the owner would, on the next shard. Return both."""
    by_name = {shard.address: shard for shard in shards}
    owner, second = RendezvousHash(by_name).ranked([wanted.chunk], 2)[0]
    for name in (owner, second):
        assert put_value(by_name[name].client, wanted, raw) is PutOutcome.STORED
    by_name[owner].store.variants.set_copies(wanted, (second,))
    return by_name[owner], by_name[second]


def test_a_hot_variant_is_served_by_two_shards(shards: list[ServedStore]) -> None:
    raw = value(4 * MIB)
    owner, second = replicated(shards, KEYS[0], raw)
    with opened(*(shard.address for shard in shards)) as store:
        assert store.lookup(WANTS[:1]).by_key()[KEYS[0]].copies == (second.address,)
        # Of two that read at once, one asks the other shard: that has less to send.
        first, other = store.get(KEYS[:1], TIMEOUT_S), store.get(KEYS[:1], TIMEOUT_S)
        for reading in (first, other):
            _, stored = next(reading)
            assert not isinstance(stored, Miss)
            assert bytes(stored.value) == raw
        # Counted a moment after the value is there.
        both = (owner, second)
        wait_until(lambda: [one.store.stats().hits_memory for one in both] == [1, 1])


def test_the_owner_serves_a_variant_whose_copy_is_gone(shards: list[ServedStore]) -> None:
    raw = value(MIB)
    _, second = replicated(shards, KEYS[0], raw)
    with opened(*(shard.address for shard in shards)) as store:
        store.lookup(WANTS[:1])
        second.store.deletes.discard(KEYS[0])
        readings = [store.get(KEYS[:1], TIMEOUT_S) for _ in range(4)]
        for reading in readings:
            _, stored = next(reading)
            assert not isinstance(stored, Miss)
            assert bytes(stored.value) == raw


async def test_a_delete_goes_to_the_named_shard(tmp_path: Path) -> None:
    with serving(tmp_path / "a") as one, serving(tmp_path / "b") as other:
        members = ChangingMembers(one.address, other.address)
        store = AsyncShardedStore(members)
        for shard in (one, other):  # both owned it, at different times
            put_value(shard.client, KEYS[0], b"abc")
        stats = await store.stats()
        assert {address: reply and reply.variants for address, reply in stats.items()} == {
            one.address: 1,
            other.address: 1,
        }
        members.addresses = (one.address, other.address, "127.0.0.1:9")
        assert store.addresses() == members.addresses
        gone = Deletion(os.urandom(16), (KEYS[0].chunk,), made_at_ms=time.time_ns() // 10**6)
        assert await store.delete_on(one.address, gone) == 1
        assert get_value(one.client, KEYS[0]) is None
        assert get_value(other.client, KEYS[0]) is not None
        assert await store.delete_on(one.address, gone) == 0
        with pytest.raises(Unavailable):
            await store.delete_on("127.0.0.1:9", gone)
        assert (await store.stats())["127.0.0.1:9"] is None
        members.addresses = (one.address,)
        with pytest.raises(Unavailable, match="no member"):
            await store.delete_on(other.address, gone)
        assert (await store.stats()).keys() == {one.address}
        await store.close()


class Shards:
    """Shards as processes that know each other."""

    def __init__(self, folder: Path, count: int, **env: str) -> None:
        self.folder = folder
        self.env = env
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
        self.running: dict[str, CacheStore] = {}
        for address in self.addresses:
            self.launch(address)
        for store in self.running.values():
            wait_for_cachestore(store)

    def launch(self, address: str) -> None:
        self.running[address] = launch_cachestore(
            self.folder / address.rpartition(":")[2],
            memory_bytes=64 * MIB,
            disk_bytes=256 * MIB,
            port=int(address.rpartition(":")[2]),
            members=",".join(self.addresses),
            env=self.env,
        )

    def kill(self, address: str) -> None:
        self.running.pop(address).service.kill()

    def restart(self, address: str) -> None:
        self.launch(address)
        wait_for_cachestore(self.running[address])

    def log(self, address: str) -> str:
        return (self.folder / address.rpartition(":")[2] / "cachestore.log").read_text()

    def close(self) -> None:
        for store in self.running.values():
            store.service.stop()


@contextmanager
def processes(folder: Path, count: int, **env: str) -> Iterator[Shards]:
    shards = Shards(folder, count, **env)
    try:
        yield shards
    finally:
        shards.close()


def test_a_shard_that_was_down_during_a_delete_never_serves_the_deleted_variants(
    tmp_path: Path,
) -> None:
    with processes(tmp_path, 3) as shards, opened(*shards.addresses) as store:
        for wanted in KEYS:
            assert put(store, wanted, raw_of(wanted)) is PutOutcome.STORED
        owners = RendezvousHash(shards.addresses).owners([wanted.chunk for wanted in KEYS])
        dead = owners[0]
        own = [k for k, owner in zip(KEYS, owners, strict=True) if owner == dead]
        wait_until(lambda: all_on_disk(dead, own))
        shards.kill(dead)
        doomed = own[: len(own) // 2]
        delete(set(shards.addresses) - {dead}, *doomed)

        served: list[VariantKey] = []
        stop = threading.Event()

        def ask() -> None:
            """Wait until it answers."""
            client = StoreClient(dead)
            while not stop.is_set():
                try:
                    found = client.get(doomed, 1.0)
                    served.extend(k for k, stored in found if not isinstance(stored, Miss))
                except Unavailable:
                    time.sleep(0.005)
            client.close()

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            shards.restart(dead)
            assert "deletes=1" in shards.log(dead)
            held = held_by(dead, own)
        finally:
            stop.set()
            asking.join()
        assert served == []
        assert held == set(own) - set(doomed), "and it has lost nothing else"


def held_by(address: str, keys: list[VariantKey]) -> set[VariantKey]:
    """Return those of keys that a shard has after its start."""
    client = StoreClient(address)
    wants = [LookupKey.for_variant(wanted) for wanted in keys]

    def answer() -> LookupAnswer | None:
        try:
            return client.lookup(wants, TIMEOUT_S)
        except Unavailable:  # this process' gRPC has not yet tried again to connect
            return None

    found = wait_until(answer)
    client.close()
    assert found is not None
    return {held.key for variants in found.variants for held in variants.stored}


def all_on_disk(address: str, keys: list[VariantKey]) -> bool:
    """Return whether a shard has written all keys to its disk."""
    client = StoreClient(address)
    try:
        return client.stats(TIMEOUT_S).disk_bytes >= sum(len(raw_of(wanted)) for wanted in keys)
    finally:
        client.close()


def test_a_shard_that_was_frozen_during_a_delete_learns_of_it_without_a_restart(
    tmp_path: Path,
) -> None:
    """The client's call is over, and no client repeats it."""
    with processes(tmp_path, 2) as shards:
        one, other = shards.addresses
        client = StoreClient(other)
        assert put_value(client, KEYS[0], raw_of(KEYS[0])) is PutOutcome.STORED
        delete([one], KEYS[0])
        wait_until(lambda: get_value(client, KEYS[0]) is None)
        # And a copy that is planned on what was known before is refused there, too.
        raw = raw_of(KEYS[0])
        outdated = variant(KEYS[0], raw)
        assert client.put(outdated, whole(outdated, raw), TIMEOUT_S) is PutOutcome.DELETED
        client.close()


def test_a_hot_variant_gets_a_copy_that_serves_for_its_owner(tmp_path: Path) -> None:
    with processes(tmp_path, 3) as shards, opened(*shards.addresses) as store:
        hot, raw = KEYS[0], value(8 * MIB)
        assert put(store, hot, raw) is PutOutcome.STORED
        owner, second = RendezvousHash(shards.addresses).ranked([hot.chunk], 2)[0]
        wants = [LookupKey.for_variant(hot)]

        def is_replicated_after_reads() -> bool:
            for _ in range(50):
                assert values(store, [hot]) == [raw]
            return bool(store.lookup(wants, TIMEOUT_S).by_key()[hot].copies)

        wait_until(is_replicated_after_reads, "a copy")
        assert store.lookup(wants, TIMEOUT_S).by_key()[hot].copies == (second,)
        shards.kill(owner)
        wait_until(lambda: values(store, [hot], 5.0) == [raw])
        assert hot in store.lookup(wants, TIMEOUT_S).by_key()
        assert values(store, [hot]) == [raw]
        delete(set(shards.addresses) - {owner}, hot)
        assert values(store, [hot]) == [Miss.LOST]
        shards.restart(owner)
        wait_until(lambda: owner in store.lookup(wants, TIMEOUT_S).as_of)
        assert values(store, [hot]) == [Miss.DELETED]
