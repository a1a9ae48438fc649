"""Replays sequences of requests through several shards and through one of the same total size.

The stores are real and in this process, under ``exact``: a hit needs every chunk before it. Each
shard owns the chunks that rendezvous hashing gives it, and the orphan collectors of the shards ask
each other as they do over gRPC. They run every SCAN_EVERY_S of the sequence's time. Every value is
one page, so that the stores keep few bytes; the sequence has the lengths.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from bench.support.traces import Access, Trace
from ragcache_cachestore.cluster.orphan_collector import OrphanCollector
from ragcache_cachestore.components import StoreOptions
from ragcache_cachestore.incoming_put import IncomingPut
from ragcache_cachestore.store import Store
from ragcache_core.cluster.sharding import RendezvousHash
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, Origin, Provenance, VariantInfo
from ragcache_core.storage.extents import PAGE_BYTES
from ragcache_core.store_api import Ack, NewVariant, PutCompletion, ReportedUses
from ragcache_wire.watched.members import FixedMembers

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
        return self.owner(key).find_misses([key]) == [None]

    def read(self, key: VariantKey) -> bool:
        """Read a value as an engine does. Return whether it was stored."""
        store = self.owner(key)
        (lease,) = opened = store.open([key], exact=True)
        store.note_opened(opened)
        if isinstance(lease, Miss):
            return False
        store.release([lease.id])
        return True

    def put(self, access: Access, key: VariantKey, parent: VariantKey | None) -> None:
        """Put a computed variant, or report the computation if it is stored."""
        store = self.owner(key)
        if self.is_stored(key):
            store.note_uses([ReportedUses(key)])
            return
        info = VariantInfo(access.num_tokens, PAGE_BYTES, 0, Provenance(exact=True))
        new = NewVariant(key, info, Origin(parent=parent), None, (PAGE_BYTES,))
        incoming = store.begin_put(new, Ack.ACCEPTED)
        assert isinstance(incoming, IncomingPut)
        with incoming:
            for view in incoming.views:
                view[:] = VALUE[: len(view)]
            incoming.commit(PutCompletion((CHECKSUM,), access.cost_s))
        store.flush()

    def collect(self) -> int:
        """Scan once on each shard. Return how many variants were dropped."""
        return sum([collector.scan() for collector in self._collectors])

    def collect_all(self) -> None:
        """Scan until no shard drops a variant."""
        for store in self._stores.values():
            store.sweep()  # so that no eviction in the background follows
        while self.collect():
            self.clock.now += SCAN_EVERY_S

    def orphans(self) -> int:
        """Count variants that a prompt cannot reach."""
        parents = {
            child: parent
            for store in self._stores.values()
            for child, parent in store.children(min_age_s=0.0)
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
        return self._stores[address].find_misses(keys)


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
