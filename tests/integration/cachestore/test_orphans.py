"""Chains of variants over three shards: no shard keeps a child whose parent is gone."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from bench.support.traces import DATA, ComputedProfile, load_traces
from harness.processes import free_port, launch_cachestore, wait_for_cachestore
from ragcache_cachestore.cluster.orphan_collector import MISSING_PARENT_S, OrphanCollector
from ragcache_cachestore.incoming_put import IncomingPut
from ragcache_cachestore.state.leases import ReadLease
from ragcache_cachestore.store import Store
from ragcache_core.cluster.sharding import RendezvousHash
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, Origin
from ragcache_core.store_api import Ack, LookupKey
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_wire.watched.members import FixedMembers
from tests.helpers.cachestore_parts import (
    TIMEOUT_S,
    ManualClock,
    ServedStore,
    completion,
    fill,
    serving,
    value,
    variant,
    whole,
)
from tests.helpers.shard_replay import NUM_SHARDS, cluster, compare, replay

PAGE = 64 << 10
CHAINS, LENGTH = 40, 6


@dataclass
class Shards:
    """Three served stores, their client and their collectors."""

    served: list[ServedStore]
    client: ShardedStore
    collectors: list[OrphanCollector]
    clock: ManualClock

    def put(self, key: VariantKey, parent: VariantKey | None) -> None:
        raw = value(PAGE)
        new = variant(key, raw, origin=Origin(parent=parent))
        self.client.put(new, whole(new, raw), TIMEOUT_S)
        for one in self.served:
            one.store.flush()

    def owner(self, key: VariantKey) -> Store:
        """Return the store of a variant."""
        stores = {one.address: one.store for one in self.served}
        return stores[RendezvousHash(tuple(stores)).owners([key.chunk])[0]]

    def stored(self, keys: list[VariantKey]) -> dict[VariantKey, bool]:
        """Return what a client can reach."""
        answer = self.client.lookup([LookupKey.for_variant(key) for key in keys])
        return {key: bool(one.stored) for key, one in zip(keys, answer.variants, strict=True)}

    def orphans(self) -> set[VariantKey]:
        """Return the stored children whose parent no client can reach."""
        parents = {c: p for one in self.served for c, p in one.store.children(0.0)}
        reachable = self.stored(list(parents.values())) if parents else {}
        return {child for child, parent in parents.items() if not reachable[parent]}

    def scan_all(self) -> None:
        """Scan until no shard drops a variant."""
        for one in self.served:
            one.store.sweep()  # so that no eviction in the background follows
        while sum([collector.scan() for collector in self.collectors]):
            pass


@contextmanager
def three_shards(folder: Path, pages: int = 32) -> Iterator[Shards]:
    clock = ManualClock()
    with ExitStack() as ends:
        served = [
            ends.enter_context(
                serving(
                    folder / str(number),
                    policy="lru",
                    memory_bytes=pages * PAGE,
                    disk_bytes=pages * PAGE,
                    leaves_only=True,
                )
            )
            for number in range(3)
        ]
        members = FixedMembers(tuple(one.address for one in served))
        client = ShardedStore(members)
        ends.callback(client.close)
        collectors = [
            OrphanCollector(one.store, members, one.address, clock=clock, min_age_s=0.0)
            for one in served
        ]
        yield Shards(served, client, collectors, clock)


def chain(number: int) -> list[VariantKey]:
    """Return the variants of one prompt, from its first chunk to its last."""
    rng = random.Random(number)
    return [VariantKey(rng.randbytes(16), rng.randbytes(16)) for _ in range(LENGTH)]


def corrupt(store: Store, key: VariantKey) -> None:
    """Change every copy of a value, as a bad device does, and report it as its readers do."""
    while isinstance(lease := store.open([key])[0], ReadLease):
        if lease.on_disk:
            os.pwrite(store.disk_tier.fd, b"rot", lease.extents[0].offset)
        else:
            store.memory_tier.views(lease.extents)[0][:3] = b"rot"
        store.release([lease.id], corrupt=[lease.id])


def test_under_pressure_no_child_is_held_without_a_reachable_parent(tmp_path: Path) -> None:
    with three_shards(tmp_path) as shards:
        ever_orphaned = 0
        for number in range(CHAINS):
            parent = None
            for key in chain(number):
                shards.put(key, parent)
                parent = key
            ever_orphaned += len(shards.orphans())
            shards.scan_all()
            assert shards.orphans() == set()
        assert ever_orphaned > 0  # otherwise the collectors had nothing to do
        assert sum([len(one.store) for one in shards.served]) > 50
        # The newest prompts are still complete.
        assert all(shards.stored(chain(CHAINS - 1)).values())
        for one in shards.served:
            one.store.check()


def test_children_of_a_silent_shard_are_kept(tmp_path: Path) -> None:
    with three_shards(tmp_path) as shards:
        for number in range(8):
            parent = None
            for key in chain(number):
                shards.put(key, parent)
                parent = key
        before = [len(one.store) for one in shards.served]
        collectors = [
            OrphanCollector(
                one.store,
                FixedMembers((one.address, "127.0.0.1:1", "127.0.0.1:2")),
                one.address,
                clock=shards.clock,
                min_age_s=0.0,
            )
            for one in shards.served
        ]
        assert [collector.scan() for collector in collectors] == [0, 0, 0]
        assert [len(one.store) for one in shards.served] == before


def test_a_parent_that_its_owner_never_stored_is_awaited(tmp_path: Path) -> None:
    """As after a shard has joined: the next request puts the parent on its new owner."""
    parent, child, *_ = chain(1)
    other, lost, *_ = chain(2)
    with three_shards(tmp_path) as shards:
        shards.put(child, parent)
        shards.put(lost, other)
        shards.scan_all()
        assert shards.stored([child, lost]) == {child: True, lost: True}
        shards.put(parent, None)
        shards.clock.now += MISSING_PARENT_S
        shards.scan_all()
        assert shards.stored([child, lost]) == {child: True, lost: False}


def test_a_parent_whose_value_was_corrupt_is_awaited(tmp_path: Path) -> None:
    """The next request puts it again, so a bad block does not cost the rest of the chain."""
    parent, child, *_ = chain(1)
    with three_shards(tmp_path) as shards:
        shards.put(parent, None)
        shards.put(child, parent)
        corrupt(shards.owner(parent), parent)
        assert shards.owner(parent).find_misses([parent]) == [Miss.CORRUPT]
        shards.scan_all()
        assert shards.stored([child]) == {child: True}
        shards.clock.now += MISSING_PARENT_S
        shards.scan_all()
        assert shards.stored([child]) == {child: False}


def test_a_parent_that_is_being_put_is_not_gone(tmp_path: Path) -> None:
    parent, child, *_ = chain(1)
    raw = value(PAGE)
    with three_shards(tmp_path) as shards:
        shards.put(parent, None)
        shards.put(child, parent)
        owner = shards.owner(parent)
        owner.discard(parent)
        assert owner.find_misses([parent]) == [Miss.EVICTED]
        puts = [owner.begin_put(variant(parent, raw)) for _ in range(2)]
        for put in puts:
            assert isinstance(put, IncomingPut)
            shards.scan_all()
            assert shards.stored([child]) == {child: True}
            put.abort()
        shards.scan_all()
        assert shards.stored([child]) == {child: False}


def test_an_owner_that_is_silent_once_does_not_prolong_the_wait(tmp_path: Path) -> None:
    child, *others = [key for number in range(8) for key in chain(number)]
    clock, raw = ManualClock(), value(PAGE)
    port = free_port()
    silent = f"127.0.0.1:{port}"
    with serving(tmp_path / "children", leaves_only=True) as served:
        members = FixedMembers((served.address, silent))
        owners = RendezvousHash(members.current())
        parent = next(key for key in others if owners.owners([key.chunk])[0] == silent)
        put = served.store.begin_put(variant(child, raw, origin=Origin(parent=parent)))
        assert isinstance(put, IncomingPut)
        fill(put.views, raw)
        put.commit(completion(put.new, raw))
        collector = OrphanCollector(
            served.store, members, served.address, clock=clock, min_age_s=0.0
        )
        with serving(tmp_path / "parents", port=port):
            assert collector.scan() == 0
        clock.now += MISSING_PARENT_S / 2
        assert collector.scan() == 0
        clock.now += MISSING_PARENT_S / 2
        assert collector.scan() == 0  # silent again: not even now it is known to be missing
        with serving(tmp_path / "parents", port=port):
            assert collector.scan() == 1


@pytest.mark.parametrize("policy", ["score", "lru"])
def test_three_shards_hit_as_much_as_one_of_the_same_size(policy: str) -> None:
    (trace,) = (
        trace
        for trace in load_traces(DATA, True, ComputedProfile())
        if trace.exact and trace.name == "generated"
    )
    figures = compare(trace, 0.2, policy)
    assert figures["hit_rate_over_one_shard"] >= 0.95
    assert figures["orphans_left"] == 0
    with cluster(NUM_SHARDS, figures["pages"], policy, collects=False) as shards:
        assert replay(trace, shards).orphans > 0


def test_three_processes_drop_orphans(tmp_path: Path) -> None:
    ports = [free_port() for _ in range(3)]
    addresses = tuple(f"127.0.0.1:{port}" for port in ports)
    with ExitStack() as ends:
        stores = []
        for number, port in enumerate(ports):
            store = launch_cachestore(
                tmp_path / str(number),
                memory_bytes=32 * PAGE,
                disk_bytes=32 * PAGE,
                port=port,
                members=",".join(addresses),
                env={"RAGCACHE_REUSE": "exact", "RAGCACHE_POLICY": "lru"},
            )
            ends.callback(store.service.stop)
            stores.append(store)
        for store in stores:
            wait_for_cachestore(store)
        client = ShardedStore(FixedMembers(addresses))
        ends.callback(client.close)
        keys = [chain(number) for number in range(CHAINS)]
        raw = value(PAGE)
        for one in keys:
            for parent, key in zip([None, *one], one, strict=False):
                new = variant(key, raw, origin=Origin(parent=parent))
                client.put(new, whole(new, raw), TIMEOUT_S, Ack.DURABLE)

        def num_orphans() -> int:
            num = 0
            for one in keys:
                wants = [LookupKey.for_variant(key) for key in one]
                found = [bool(each.stored) for each in client.lookup(wants).variants]
                num += sum(child and not parent for parent, child in pairwise(found))
            return num

        assert num_orphans() > 0
        deadline = time.monotonic() + 120
        while num_orphans():
            assert time.monotonic() < deadline
            time.sleep(0.5)
