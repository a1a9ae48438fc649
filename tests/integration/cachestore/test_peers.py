"""The exchange of shards: deletes that one of them missed, and copies of hot variants."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.processes import free_port
from ragcache_cachestore.cluster import replicator
from ragcache_cachestore.cluster.catch_up import CatchUp, PullTimes
from ragcache_cachestore.cluster.replicator import HALF_LIFE_S, Replicator
from ragcache_cachestore.state.tombstones import LIFETIME_MS
from ragcache_core.cluster.replication import ReplicationThresholds
from ragcache_core.cluster.sharding import RendezvousHash
from ragcache_core.errors import Unavailable
from ragcache_core.identity.variant import Miss
from ragcache_core.store_api import Deletion, LookupKey, PutOutcome
from ragcache_wire.watched.members import FixedMembers
from tests.kit.clock import ManualTime
from tests.kit.store import MIB, TIMEOUT_S, ServedStore, get, key, put, serving, value
from tests.kit.wait import wait_until

KEY = key(1)
RAW = value(MIB)


def deletion(made_at_ms: int | None = None) -> Deletion:
    made = time.time_ns() // 1_000_000 if made_at_ms is None else made_at_ms
    return Deletion(os.urandom(16), (KEY.chunk,), made_at_ms=made)


def peer_ports(address: str) -> frozenset[int]:
    """Return the local ports of this process's established connections to an address."""
    port = int(address.rpartition(":")[2])
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, remote, state = line.split()[1:4]
        if int(remote.rpartition(":")[2], 16) == port and state == "01":
            found.add(int(local.rpartition(":")[2], 16))
    return frozenset(found)


def pulled_to(puller: ServedStore, peer: ServedStore, sequence: int) -> bool:
    """Return whether a shard has pulled the deletes of a peer up to a sequence."""
    return puller.store.deletes.pull_positions().get(peer.store.store_id) == sequence


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[tuple[ServedStore, ServedStore]]:
    with serving(tmp_path / "a") as one, serving(tmp_path / "b") as other:
        yield one, other


@contextmanager
def catching_up(
    shard: ServedStore, *peers: str, interval_s: float = 60.0, first_s: float = TIMEOUT_S
) -> Iterator[CatchUp]:
    members = FixedMembers((shard.address, *peers))
    times = PullTimes(first_s=first_s, interval_s=interval_s)
    catch_up = CatchUp(shard.store, members, shard.address, times)
    try:
        catch_up.start()
        yield catch_up
    finally:
        catch_up.close()


def test_start_returns_after_the_deletes_of_the_peers_are_applied(
    shards: tuple[ServedStore, ServedStore], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = shards
    put(one.store, KEY, RAW)
    put(one.store, key(2), RAW)
    other.store.deletes.apply([deletion()])
    with caplog.at_level("INFO"), catching_up(one, other.address):
        assert get(one.store, KEY) is Miss.DELETED
        assert get(one.store, key(2)) == RAW
    assert "deletes=1 removed_variants=1" in caplog.text
    assert one.store.deletes.after(0).deletions == other.store.deletes.after(0).deletions


def test_a_delete_is_applied_once(
    shards: tuple[ServedStore, ServedStore], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = shards
    known = deletion()
    for shard in shards:
        shard.store.deletes.apply([known])
    put(one.store, KEY, RAW)  # again, after the delete
    with caplog.at_level("INFO"), catching_up(one, other.address):
        assert get(one.store, KEY) == RAW
    assert "deletes=1 removed_variants=0" in caplog.text


def test_a_silent_peer_does_not_block_the_start_and_is_asked_again(
    tmp_path: Path, shards: tuple[ServedStore, ServedStore], caplog: pytest.LogCaptureFixture
) -> None:
    one, _ = shards
    put(one.store, KEY, RAW)
    port = free_port()
    with (
        caplog.at_level("INFO"),
        catching_up(one, f"127.0.0.1:{port}", interval_s=0.05, first_s=0.1),
    ):
        assert "peer is silent" in caplog.text
        assert get(one.store, KEY) == RAW
        with serving(tmp_path / "second", port=port) as second:
            second.store.deletes.apply([deletion()])
            wait_until(lambda: get(one.store, KEY) is Miss.DELETED)
            # Logged once, although many pulls fail.
            assert caplog.text.count("peer is silent") == 1


def test_shards_that_start_together_exchange_their_deletes(
    tmp_path: Path, shards: tuple[ServedStore, ServedStore]
) -> None:
    one, _ = shards
    put(one.store, KEY, RAW)
    port = free_port()
    members = FixedMembers((one.address, f"127.0.0.1:{port}"))
    progress: list[str] = []
    catch_up = CatchUp(one.store, members, one.address, progress=progress.append)
    starting = threading.Thread(target=catch_up.start)
    starting.start()
    wait_until(lambda: len(progress) >= 2)
    assert "0 of 1 have answered" in progress[-1]
    with serving(tmp_path / "second") as before:
        before.store.deletes.apply([deletion()])
    with serving(tmp_path / "second", port=port):
        starting.join(TIMEOUT_S)
        assert get(one.store, KEY) is Miss.DELETED
        catch_up.close()


def test_a_shard_that_cannot_apply_deletes_does_not_serve(
    shards: tuple[ServedStore, ServedStore],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, other = shards
    other.store.deletes.apply([deletion()])
    broken = threading.Event()
    apply = one.store.deletes.apply

    def apply_unless_broken(batch: Sequence[Deletion]) -> int:
        if not broken.is_set():
            raise Unavailable("cachestore", "its disk is full")
        return apply(batch)

    monkeypatch.setattr(one.store.deletes, "apply", apply_unless_broken)
    members = FixedMembers((one.address, other.address))
    catch_up = CatchUp(one.store, members, one.address, PullTimes(first_s=0.0))
    starting = threading.Thread(target=catch_up.start)
    starting.start()
    wait_until(lambda: "cannot apply deletes" in caplog.text)
    assert starting.is_alive(), "a failure of its own disk does not count as a silent peer"
    broken.set()
    starting.join(TIMEOUT_S)
    catch_up.close()
    assert len(one.store.deletes.after(0).deletions) == 1


class TwoVolumes:
    """Two shards on volumes and ports of their own. The second one can stop and start.

    Attributes:
        time: Of the second shard.
    """

    def __init__(self, folder: Path, first: ServedStore, **settings: Any) -> None:
        self.first = first
        self.time = ManualTime(time.time_ns() // 1_000_000)
        self.address = f"127.0.0.1:{free_port()}"
        self._folder = folder
        self._settings = settings

    def second(self, volume: str = "second") -> AbstractContextManager[ServedStore]:
        """Run the second shard on a volume, at the same address as always."""
        return serving(
            self._folder / volume,
            port=int(self.address.rpartition(":")[2]),
            **self.time.settings,
            **self._settings,
        )

    def pull(self) -> None:
        """Let the first shard pull the deletes of the second one, as after a restart."""
        with catching_up(self.first, self.address):
            pass


@pytest.fixture
def volumes(tmp_path: Path, shards: tuple[ServedStore, ServedStore]) -> TwoVolumes:
    return TwoVolumes(tmp_path, shards[0])


def test_a_pull_gets_what_came_after_the_last_one(
    volumes: TwoVolumes, caplog: pytest.LogCaptureFixture
) -> None:
    with volumes.second() as second, caplog.at_level("INFO"):
        second.store.deletes.apply([deletion()])
        volumes.pull()
        second.store.deletes.apply([deletion()])
        second.store.deletes.apply([deletion()])
        volumes.pull()
        volumes.pull()
    assert [int(n) for n in re.findall(r" deletes=(\d+)", caplog.text)] == [1, 2, 0]


def test_a_peer_that_was_dead_for_days_costs_no_variant(volumes: TwoVolumes) -> None:
    put(volumes.first.store, KEY, RAW)
    with volumes.second() as second:
        put(second.store, KEY, RAW)
        second.store.deletes.apply([Deletion(b"", (key(7).chunk,))])
        volumes.pull()
    with catching_up(volumes.first, volumes.address, interval_s=0.02, first_s=0.0):
        time.sleep(0.1)
        assert get(volumes.first.store, KEY) == RAW
    volumes.time.pass_ms(3 * LIFETIME_MS)
    with volumes.second() as second:
        second.store.deletes.forget()
        assert (second.store.stats().variants, second.store.stats().tombstones) == (0, 0)
        volumes.pull()
    assert get(volumes.first.store, KEY) == RAW


def test_a_delete_that_only_a_dead_peer_knew_is_applied_when_it_returns(
    volumes: TwoVolumes,
) -> None:
    put(volumes.first.store, KEY, RAW)
    put(volumes.first.store, key(2), RAW)
    with volumes.second() as second:
        volumes.pull()
        second.store.deletes.apply([deletion(volumes.time.now_ms)])
    volumes.time.pass_ms(3 * LIFETIME_MS)
    with volumes.second():
        volumes.pull()
    assert get(volumes.first.store, KEY) is Miss.DELETED
    assert get(volumes.first.store, key(2)) == RAW


def test_deletes_that_a_peer_has_forgotten_drop_every_variant(
    volumes: TwoVolumes, caplog: pytest.LogCaptureFixture
) -> None:
    """The shards could not reach each other for longer than a delete is remembered."""
    put(volumes.first.store, KEY, RAW)
    put(volumes.first.store, key(2), RAW)
    with volumes.second() as second:
        volumes.pull()
        second.store.deletes.apply([deletion(volumes.time.now_ms)])
        volumes.time.pass_ms(LIFETIME_MS + 1)
        second.store.deletes.apply([Deletion(b"", (key(7).chunk,))])
        second.store.deletes.forget()
        volumes.pull()
        assert get(volumes.first.store, KEY) is Miss.EVICTED
        assert get(volumes.first.store, key(2)) is Miss.EVICTED
        assert "has forgotten deletes" in caplog.text
        put(volumes.first.store, key(2), RAW)
        volumes.pull()
    assert get(volumes.first.store, key(2)) == RAW, "dropped once"


def test_deletes_above_the_bound_of_memory_are_not_missed(
    tmp_path: Path, shards: tuple[ServedStore, ServedStore]
) -> None:
    volumes = TwoVolumes(tmp_path, shards[0], max_tombstone_bytes=20_000)
    put(volumes.first.store, key(5000), RAW)
    with volumes.second() as second:
        for first in range(0, 500, 25):
            second.store.deletes.apply(
                [Deletion(b"", (key(n).chunk,)) for n in range(first, first + 25)]
            )
            volumes.pull()
        assert second.store.stats().tombstones < 100
        assert get(volumes.first.store, key(5000)) == RAW, "each pull came in time"
        second.store.deletes.apply([Deletion(b"", (key(n).chunk,)) for n in range(4901, 5101)])
        volumes.pull()
    assert get(volumes.first.store, key(5000)) is Miss.EVICTED


def test_a_peer_on_an_empty_disk_is_pulled_from_the_start(volumes: TwoVolumes) -> None:
    put(volumes.first.store, KEY, RAW)
    with volumes.second() as second:
        for number in range(50, 60):
            second.store.deletes.apply([Deletion(b"", (key(number).chunk,))])
        volumes.pull()
    with volumes.second("new") as second:
        # Its numbers begin at 1 again.
        second.store.deletes.apply([Deletion(b"", (key(2).chunk,))])
        volumes.pull()
        assert get(volumes.first.store, KEY) == RAW
        second.store.deletes.apply([deletion()])
        volumes.pull()
    assert get(volumes.first.store, KEY) is Miss.DELETED
    with volumes.second() as second:  # the first volume is back
        volumes.pull()
        assert len(volumes.first.store.deletes.after(0).deletions) == 12


def test_an_empty_shard_joins_peers_that_have_forgotten_deletes(volumes: TwoVolumes) -> None:
    with volumes.second() as second:
        second.store.deletes.apply([deletion(volumes.time.now_ms)])
        volumes.time.pass_ms(LIFETIME_MS + 1)
        second.store.deletes.forget()
        volumes.pull()
        assert put(volumes.first.store, KEY, RAW) is PutOutcome.STORED
        volumes.pull()
    assert get(volumes.first.store, KEY) == RAW


def test_one_connection_to_a_peer_serves_all_pulls(volumes: TwoVolumes) -> None:
    with volumes.second() as second, catching_up(volumes.first, volumes.address, interval_s=0.01):
        ports = {peer_ports(second.address)}
        for number in range(1, 6):
            second.store.deletes.apply([Deletion(b"", (key(number).chunk,))])
            wait_until(partial(pulled_to, volumes.first, second, number))
            ports.add(peer_ports(second.address))
    assert len(ports) == 1


def test_a_single_shard_asks_no_peers(shards: tuple[ServedStore, ServedStore]) -> None:
    progress: list[str] = []
    before = set(threading.enumerate())
    catch_up = CatchUp(shards[0].store, None, shards[0].address, progress=progress.append)
    catch_up.start()
    # It does not ask now, and starts no thread.
    assert progress == []
    assert not [one for one in set(threading.enumerate()) - before if "catch-up" in one.name]
    catch_up.close()


class TwoShards:
    """Two shards. The first one owns KEY and makes copies of hot variants."""

    def __init__(self, shards: tuple[ServedStore, ServedStore]) -> None:
        names = tuple(shard.address for shard in shards)
        owner = RendezvousHash(names).owners([KEY.chunk])[0]
        self.owner, self.second = shards if owner == names[0] else shards[::-1]
        self.now = 1000.0
        thresholds = ReplicationThresholds(copy_share=0.5, drop_share=0.1, min_bytes_per_s=1000.0)
        self.replicator, self.second_replicator = (
            Replicator(
                shard.store,
                FixedMembers(names),
                shard.address,
                thresholds,
                clock=lambda: self.now,
            )
            for shard in (self.owner, self.second)
        )
        # To drop a copy, a shard calls the service of the other one.
        self.second.service._replicator = self.second_replicator


@pytest.fixture
def pair(shards: tuple[ServedStore, ServedStore]) -> TwoShards:
    return TwoShards(shards)


def copy_hot(pair: TwoShards) -> None:
    """Read the variant of the first shard until it is hot, and let that shard copy it."""
    for _ in range(3):
        get(pair.owner.store, KEY)
    pair.replicator.check()


def copies(pair: TwoShards) -> tuple[str, ...]:
    """Return the copies that a lookup at the owner tells."""
    (found,) = pair.owner.client.lookup([LookupKey.for_variant(KEY)]).variants
    return found.stored[0].copies if found.stored else ()


def test_a_hot_variant_is_copied_and_the_copy_is_dropped_when_it_is_cold(pair: TwoShards) -> None:
    put(pair.owner.store, KEY, RAW)
    pair.replicator.check()
    assert copies(pair) == ()
    copy_hot(pair)
    assert copies(pair) == (pair.second.address,)
    assert get(pair.second.store, KEY) == RAW
    # A copy is not copied further, even if it is hot there.
    pair.second_replicator.check()
    assert pair.second.client.stats().variants == 1
    pair.now += 100 * HALF_LIFE_S
    pair.replicator.check()
    assert copies(pair) == ()
    assert get(pair.second.store, KEY) is Miss.EVICTED
    assert get(pair.owner.store, KEY) == RAW
    # It is dropped without a tombstone, so that it may come back.
    assert pair.second.store.deletes.after(0).deletions == ()
    copy_hot(pair)
    assert get(pair.second.store, KEY) == RAW


def test_a_variant_that_was_put_again_after_a_delete_is_copied(pair: TwoShards) -> None:
    for shard in (pair.owner, pair.second):
        shard.store.deletes.apply([deletion()])
    with catching_up(pair.owner, pair.second.address):
        put(pair.owner.store, KEY, RAW)
        copy_hot(pair)
    assert get(pair.second.store, KEY) == RAW


def test_a_copy_is_refused_after_a_delete(pair: TwoShards) -> None:
    """The delete has reached one shard, but not yet the other."""
    put(pair.owner.store, KEY, RAW)
    pair.second.store.deletes.apply([deletion()])
    copy_hot(pair)
    assert get(pair.second.store, KEY) is Miss.DELETED
    assert copies(pair) == ()


def test_a_shard_drops_its_copies_and_not_its_own_variants(pair: TwoShards) -> None:
    put(pair.owner.store, KEY, RAW)
    put(pair.second.store, KEY, RAW)
    assert not pair.replicator.drop_own_copy(KEY)
    assert pair.second_replicator.drop_own_copy(KEY)
    assert not pair.second_replicator.drop_own_copy(KEY), "no longer stored"
    assert get(pair.owner.store, KEY) == RAW
    assert get(pair.second.store, KEY) is Miss.EVICTED


def test_a_shard_that_is_no_member_drops_nothing(pair: TwoShards) -> None:
    put(pair.second.store, KEY, RAW)
    removed = Replicator(
        pair.second.store, FixedMembers((pair.owner.address,)), pair.second.address
    )
    assert not removed.drop_own_copy(KEY)
    assert get(pair.second.store, KEY) == RAW


def test_a_failed_copy_does_not_end_the_replicator(
    pair: TwoShards, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicator, "CHECK_INTERVAL_S", 0.01)
    with ExitStack() as stack:
        lonely = Replicator(
            pair.owner.store,
            FixedMembers((pair.owner.address, "127.0.0.1:9")),
            pair.owner.address,
            ReplicationThresholds(0.5, 0.1, 1000.0),
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
        wait_until(lambda: caplog.text.count("shard=127.0.0.1:9") > 1)
    assert get(pair.owner.store, wanted) == RAW
