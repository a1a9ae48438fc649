"""Chains of variants over three shards: no shard keeps a child whose parent is gone."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import xxhash

from bench.support.traces import DATA, Access, Trace, load_traces
from harness.processes import free_port, launch_cachestore, wait_for_cachestore
from ragcache_cachestore.cluster.orphan_collector import MISSING_PARENT_S, OrphanCollector
from ragcache_cachestore.puts import IncomingPut
from ragcache_cachestore.state.leases import ReadLease
from ragcache_cachestore.state.store_state import StoreOptions
from ragcache_cachestore.store import Store
from ragcache_core.cluster.sharding import RendezvousHash
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, Origin, Provenance, VariantInfo
from ragcache_core.storage.extents import PAGE_BYTES
from ragcache_core.store_api import Ack, LookupKey, NewVariant, PutCompletion, ReportedUses
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_wire.watched.members import FixedMembers
from tests.kit.clock import ManualClock
from tests.kit.store import TIMEOUT_S, ServedStore, completion, fill, serving, value, variant, whole
from tests.kit.wait import wait_until

NUM_SHARDS = 3
SCAN_EVERY_S = 10.0
MEMORY_SHARE = 0.25
VALUE = bytes(PAGE_BYTES)
CHECKSUM = xxhash.xxh3_64_intdigest(VALUE)


@dataclass(slots=True)
class TraceClock:
    """The time of the sequence."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one sequence with one number of shards."""

    hit_rate: float
    orphans: int
    variants: int


class Cluster:
    """Real stores in this process, each with the chunks that it owns."""

    def __init__(self, stores: dict[str, Store], clock: TraceClock, *, collects: bool) -> None:
        members = FixedMembers(tuple(stores))
        self._stores = stores
        self._owners = RendezvousHash(stores)
        self._owner_of: dict[VariantKey, Store] = {}
        self.clock = clock
        self._collectors = [
            OrphanCollector(store, members, name, ask=self._ask, clock=clock, min_age_s=0.0)
            for name, store in stores.items()
            if collects
        ]

    def owner(self, key: VariantKey) -> Store:
        """Return the store that owns a variant."""
        if key not in self._owner_of:
            self._owner_of[key] = self._stores[self._owners.owners([key.chunk])[0]]
        return self._owner_of[key]

    def is_stored(self, key: VariantKey) -> bool:
        """Return whether the owner stores a variant."""
        return self.owner(key).reads.find_misses([key]) == [None]

    def read(self, key: VariantKey) -> bool:
        """Read a value as an engine does. Return whether it was stored."""
        store = self.owner(key)
        (lease,) = opened = store.reads.open([key], exact=True)
        store.reads.note_opened(opened)
        if isinstance(lease, Miss):
            return False
        store.reads.release([lease.id])
        return True

    def put(self, access: Access, key: VariantKey, parent: VariantKey | None) -> None:
        """Put a computed variant, or report the computation if it is stored."""
        store = self.owner(key)
        if self.is_stored(key):
            store.reads.note_uses([ReportedUses(key)])
            return
        info = VariantInfo(access.num_tokens, PAGE_BYTES, 0, Provenance(exact=True))
        new = NewVariant(key, info, Origin(parent=parent), None, (PAGE_BYTES,))
        incoming = store.puts.begin(new, Ack.ACCEPTED)
        assert isinstance(incoming, IncomingPut)
        with incoming:
            for view in incoming.views:
                view[:] = VALUE[: len(view)]
            incoming.commit(PutCompletion((CHECKSUM,), access.cost_s))
        store.mover.writer.flush()

    def collect(self) -> int:
        """Scan once on each shard. Return how many variants were dropped."""
        return sum([collector.scan() for collector in self._collectors])

    def collect_all(self) -> None:
        """Scan until no shard drops a variant."""
        for store in self._stores.values():
            store.housekeeping.sweep()  # so that no eviction in the background follows
        while self.collect():
            self.clock.now += SCAN_EVERY_S

    def orphans(self) -> int:
        """Count variants that a prompt cannot reach."""
        parents = {
            child: parent
            for store in self._stores.values()
            for child, parent in store.variants.children(min_age_s=0.0)
        }
        return sum([not self._is_reachable(child, parents) for child in parents])

    def num_variants(self) -> int:
        """Count the stored variants."""
        return sum([len(store) for store in self._stores.values()])

    def _is_reachable(self, key: VariantKey, parents: dict[VariantKey, VariantKey]) -> bool:
        parent = parents.get(key)
        while parent is not None:
            if not self.is_stored(parent):
                return False
            parent = parents.get(parent)
        return True

    def _ask(self, address: str, keys: Sequence[VariantKey]) -> Sequence[Miss | None]:
        return self._stores[address].reads.find_misses(keys)


@contextmanager
def cluster(num_shards: int, pages: int, policy: str, *, collects: bool) -> Iterator[Cluster]:
    """Open stores with this many pages in total."""
    clock = TraceClock()
    disk_bytes = pages // num_shards * PAGE_BYTES
    memory_bytes = max(16 * PAGE_BYTES, int(disk_bytes * MEMORY_SHARE))
    with ExitStack() as ends:
        stores = {}
        for number in range(num_shards):
            folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
            options = StoreOptions(
                memory_bytes, disk_bytes, policy=policy, leaves_only=True, clock=clock
            )
            store = stores[f"shard-{number}:50051"] = Store(folder, options)
            ends.callback(store.close, flush=False)
        yield Cluster(stores, clock, collects=collects)


def replay(trace: Trace, shards: Cluster) -> Run:
    """Replay a sequence."""
    tokens = hit_tokens = 0
    scan_at = SCAN_EVERY_S
    for request in trace.requests:
        shards.clock.now = max(shards.clock.now, request.time_s)
        if shards.clock.now >= scan_at:
            shards.collect()
            scan_at = shards.clock.now + SCAN_EVERY_S
        parent: VariantKey | None = None
        misses = False
        for access in request.accesses:
            key = variant_key(access)
            tokens += access.num_tokens
            if not misses and shards.read(key):
                hit_tokens += access.num_tokens
            else:
                misses = True
                shards.put(access, key, parent)
            parent = key
    shards.collect_all()
    return Run(hit_tokens / tokens, shards.orphans(), shards.num_variants())


def variant_key(access: Access) -> VariantKey:
    """Return the key of a chunk after its prefix."""
    chunk, prefix = (
        xxhash.xxh3_128_digest(number.to_bytes(8, "little"))
        for number in (access.chunk, access.key)
    )
    return VariantKey(chunk, prefix)


def compare(trace: Trace, share: float, policy: str) -> dict[str, Any]:
    """Run one capacity with one shard, with several, and with several without collectors."""
    num_variants = len({access.key for request in trace.requests for access in request.accesses})
    pages = max(64 * NUM_SHARDS, int(num_variants * share))
    runs = []
    for num_shards, collects in ((1, False), (NUM_SHARDS, True), (NUM_SHARDS, False)):
        with cluster(num_shards, pages, policy, collects=collects) as shards:
            runs.append(replay(trace, shards))
    one, several, without = runs
    return {
        "sequence": trace.name,
        "capacity": share,
        "pages": pages,
        "hit_rate_of_one_shard": round(one.hit_rate, 4),
        "hit_rate": round(several.hit_rate, 4),
        "hit_rate_without_collector": round(without.hit_rate, 4),
        "hit_rate_over_one_shard": round(several.hit_rate / one.hit_rate, 3),
        "orphans_left": several.orphans,
        "orphans_without_collector": round(without.orphans / without.variants, 3),
    }


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
            one.store.mover.writer.flush()

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
        parents = {c: p for one in self.served for c, p in one.store.variants.children(0.0)}
        reachable = self.stored(list(parents.values())) if parents else {}
        return {child for child, parent in parents.items() if not reachable[parent]}

    def scan_all(self) -> None:
        """Scan until no shard drops a variant."""
        for one in self.served:
            one.store.housekeeping.sweep()  # so that no eviction in the background follows
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
    while isinstance(lease := store.reads.open([key])[0], ReadLease):
        if lease.on_disk:
            os.pwrite(store.disk_tier.fd, b"rot", lease.copy.extents[0].offset)
        else:
            store.memory_tier.views(lease.copy.extents)[0][:3] = b"rot"
        store.reads.release([lease.id], corrupt=[lease.id])


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
        assert shards.owner(parent).reads.find_misses([parent]) == [Miss.CORRUPT]
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
        owner.deletes.discard(parent)
        assert owner.reads.find_misses([parent]) == [Miss.EVICTED]
        puts = [owner.puts.begin(variant(parent, raw)) for _ in range(2)]
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
        put = served.store.puts.begin(variant(child, raw, origin=Origin(parent=parent)))
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
        trace for trace in load_traces(DATA, True) if trace.exact and trace.name == "generated"
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
        wait_until(lambda: not num_orphans())
