"""What shards tell each other: deletes that one of them missed, and copies of what is hot."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bench.support.processes import free_port
from ragcache_cachestore.cluster.catch_up import CatchUp
from ragcache_cachestore.cluster.replicator import HALF_LIFE_S, Replicator
from ragcache_cachestore.state.tombstones import AWAY_MS
from ragcache_core.cluster.replication import ReplicationThresholds
from ragcache_core.cluster.sharding import RendezvousHash
from ragcache_core.errors import Unavailable
from ragcache_core.identity.variant import Miss
from ragcache_core.store_api import Deletion, LookupKey, PutOutcome
from ragcache_wire.watched.members import FixedMembers
from tests.helpers.cachestore_parts import MIB, TIMEOUT_S, Served, get, key, put, serving, value

KEY = key(1)
RAW = value(MIB)


def deletion(made_at_ms: int | None = None) -> Deletion:
    made = time.time_ns() // 1_000_000 if made_at_ms is None else made_at_ms
    return Deletion(os.urandom(16), (KEY.chunk,), made_at_ms=made)


def eventually(claim: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not claim():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[tuple[Served, Served]]:
    with serving(tmp_path / "a") as one, serving(tmp_path / "b") as other:
        yield one, other


@contextmanager
def rejoining(
    shard: Served, *peers: str, every_s: float = 60.0, first_s: float = TIMEOUT_S
) -> Iterator[CatchUp]:
    members = FixedMembers((shard.address, *peers))
    rejoin = CatchUp(shard.store, members, shard.address, pull_every_s=every_s, first_pull_s=first_s)
    try:
        rejoin.start()
        yield rejoin
    finally:
        rejoin.close()


def test_what_a_peer_knows_to_be_deleted_is_gone_when_the_start_returns(
    shards: tuple[Served, Served], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = shards
    put(one.store, KEY, RAW)
    put(one.store, key(2), RAW)
    other.store.delete(deletion())
    with caplog.at_level("INFO"), rejoining(one, other.address):
        assert get(one.store, KEY) is Miss.DELETED
        assert get(one.store, key(2)) == RAW
    assert "told of 1 deletes, which removed 1 variants" in caplog.text
    assert [d.id for d in one.store.tombstones_since(0)] == [
        d.id for d in other.store.tombstones_since(0)
    ]


def test_what_was_heard_before_is_applied_once(
    shards: tuple[Served, Served], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = shards
    heard = deletion()
    for shard in shards:
        shard.store.delete(heard)
    put(one.store, KEY, RAW)  # anew, after it
    with caplog.at_level("INFO"), rejoining(one, other.address):
        assert get(one.store, KEY) == RAW
    assert "told of 1 deletes, which removed 0 variants" in caplog.text


def test_a_peer_that_is_away_holds_up_no_start_and_is_asked_later(
    tmp_path: Path, shards: tuple[Served, Served], caplog: pytest.LogCaptureFixture
) -> None:
    one, _ = shards
    put(one.store, KEY, RAW)
    port = free_port()
    with (
        caplog.at_level("INFO"),
        rejoining(one, f"127.0.0.1:{port}", every_s=0.05, first_s=0.1),
    ):
        assert "did not tell its deletes" in caplog.text
        assert get(one.store, KEY) == RAW
        with serving(tmp_path / "late", port=port) as late:
            late.store.delete(deletion())
            eventually(lambda: get(one.store, KEY) is Miss.DELETED)
            # Said once, however often it is tried.
            assert caplog.text.count("did not tell its deletes") == 1


def test_shards_that_start_together_hear_each_other(
    tmp_path: Path, shards: tuple[Served, Served]
) -> None:
    one, _ = shards
    put(one.store, KEY, RAW)
    port = free_port()
    members = FixedMembers((one.address, f"127.0.0.1:{port}"))
    said: list[str] = []
    rejoin = CatchUp(one.store, members, one.address, progress=said.append)
    starting = threading.Thread(target=rejoin.start)
    starting.start()
    eventually(lambda: len(said) >= 2)
    assert "0 of 1 have answered" in said[-1]
    with serving(tmp_path / "late") as before:
        before.store.delete(deletion())
    with serving(tmp_path / "late", port=port):
        starting.join(TIMEOUT_S)
        assert get(one.store, KEY) is Miss.DELETED
        rejoin.close()


def test_what_cannot_be_applied_keeps_it_from_serving(
    shards: tuple[Served, Served],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, other = shards
    other.store.delete(deletion())
    broken = threading.Event()
    apply = one.store.delete_many

    def delete_many(batch: Sequence[Deletion]) -> int:
        if not broken.is_set():
            raise Unavailable("cachestore", "its disk is full")
        return apply(batch)

    monkeypatch.setattr(one.store, "delete_many", delete_many)
    rejoin = CatchUp(
        one.store, FixedMembers((one.address, other.address)), one.address, first_pull_s=0.0
    )
    starting = threading.Thread(target=rejoin.start)
    starting.start()
    eventually(lambda: "cannot be applied" in caplog.text)
    assert starting.is_alive(), "its own disk is no silence of a peer's"
    broken.set()
    starting.join(TIMEOUT_S)
    rejoin.close()
    assert len(one.store.tombstones_since(0)) == 1


def test_a_peer_that_was_silent_for_a_day_costs_everything(
    shards: tuple[Served, Served],
) -> None:
    one, _ = shards
    put(one.store, KEY, RAW)
    now_ms = [time.time_ns() // 1_000_000]
    members = FixedMembers((one.address, f"127.0.0.1:{free_port()}"))
    rejoin = CatchUp(
        one.store,
        members,
        one.address,
        now_ms=lambda: now_ms[0],
        first_pull_s=0.0,
        pull_every_s=0.02,
    )
    rejoin.start()
    now_ms[0] += AWAY_MS - 60_000
    time.sleep(0.1)
    assert get(one.store, KEY) == RAW
    now_ms[0] += 120_000
    eventually(lambda: get(one.store, KEY) is Miss.EVICTED)
    rejoin.close()


def test_an_only_shard_asks_nobody(shards: tuple[Served, Served]) -> None:
    told: list[str] = []
    before = set(threading.enumerate())
    rejoin = CatchUp(shards[0].store, None, shards[0].address, progress=told.append)
    rejoin.start()
    # It neither asks now nor goes on in the background.
    assert told == []
    assert not [one for one in set(threading.enumerate()) - before if "rejoin" in one.name]
    rejoin.close()


class Pair:
    """Two shards, the first of which owns KEY and makes replicas of what is hot."""

    def __init__(self, shards: tuple[Served, Served]) -> None:
        names = tuple(shard.address for shard in shards)
        owner = RendezvousHash(names).owners([KEY.chunk])[0]
        self.owner, self.second = shards if owner == names[0] else shards[::-1]
        self.now = 1000.0
        thresholds = ReplicationThresholds(copy_share=0.5, drop_share=0.1, min_bytes_per_s=1000.0)
        self.of_owner, self.of_second = (
            Replicator(
                shard.store,
                FixedMembers(names),
                shard.address,
                thresholds,
                clock=lambda: self.now,
            )
            for shard in (self.owner, self.second)
        )
        # What a shard drops there it asks of the other's service.
        self.second.service._replication = self.of_second


@pytest.fixture
def pair(shards: tuple[Served, Served]) -> Pair:
    return Pair(shards)


def replicas(pair: Pair) -> tuple[str, ...]:
    """What a lookup at the owner tells."""
    (found,) = pair.owner.client.lookup([LookupKey.for_variant(KEY)]).variants
    return found.stored[0].replicas if found.stored else ()


def test_what_is_hot_is_copied_and_dropped_when_it_has_cooled(pair: Pair) -> None:
    put(pair.owner.store, KEY, RAW)
    pair.of_owner.look()
    assert replicas(pair) == ()
    for _ in range(3):
        get(pair.owner.store, KEY)
    pair.of_owner.look()
    assert replicas(pair) == (pair.second.address,)
    assert get(pair.second.store, KEY) == RAW
    # What is a replica goes no further, however hot it is there.
    pair.of_second.look()
    assert pair.second.client.stats().variants == 1
    pair.now += 100 * HALF_LIFE_S
    pair.of_owner.look()
    assert replicas(pair) == ()
    assert get(pair.second.store, KEY) is Miss.EVICTED
    assert get(pair.owner.store, KEY) == RAW
    # Dropped without a trace, so that it may come back.
    assert pair.second.store.tombstones_since(0) == []
    assert pair.of_owner.change(KEY, pair.second.address, drop=False)
    assert get(pair.second.store, KEY) == RAW


def test_a_copy_never_comes_after_a_delete_of_it(pair: Pair) -> None:
    """The delete has reached one shard and is on its way to the other."""
    put(pair.owner.store, KEY, RAW)
    pair.second.store.delete(deletion())
    assert not pair.of_owner.change(KEY, pair.second.address, drop=False)
    assert get(pair.second.store, KEY) is Miss.DELETED
    assert replicas(pair) == ()


def test_only_members_hold_replicas_and_an_owner_keeps_its_own(pair: Pair) -> None:
    put(pair.owner.store, KEY, RAW)
    assert not pair.of_owner.change(KEY, "127.0.0.1:9", drop=False)
    assert not pair.of_owner.change(KEY, pair.owner.address, drop=True)
    assert not pair.of_owner.change(key(5), pair.second.address, drop=False), "not held"
    assert get(pair.owner.store, KEY) == RAW


def test_a_shard_that_cannot_take_a_copy_ends_nothing(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        lonely = Replicator(
            pair.owner.store,
            FixedMembers((pair.owner.address, "127.0.0.1:9")),
            pair.owner.address,
            ReplicationThresholds(0.5, 0.1, 1000.0),
            look_every_s=0.01,
        )
        wanted = next(
            key(n << 96)
            for n in range(1, 99)
            if RendezvousHash((pair.owner.address, "127.0.0.1:9")).owners([key(n << 96).chunk])
            == [pair.owner.address]
        )
        assert put(pair.owner.store, wanted, RAW) is PutOutcome.STORED
        lonely.start()
        stack.callback(lonely.close)
        get(pair.owner.store, wanted)
        eventually(lambda: "replica on 127.0.0.1:9" in caplog.text)
        with pytest.raises(Unavailable):
            lonely.change(wanted, "127.0.0.1:9", drop=False)
    assert get(pair.owner.store, wanted) == RAW
