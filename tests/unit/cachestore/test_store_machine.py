"""The store against a model of its answers, under random calls, restarts and kills.

A cache may evict any value, so the model says what a read may return: the bytes last put under that
key, or a miss, and never a deleted value. A durable value may be missing only if the disk tier had
to evict. A leased value must read the same until it is released.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ragcache_cachestore.state.leases import ReadLease
from ragcache_cachestore.state.store_state import StoreOptions
from ragcache_cachestore.store import Store
from ragcache_core.errors import Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, Origin, Tier
from ragcache_core.store_api import Ack, AsOf, Deletion, PutOutcome
from ragcache_wire.watched.key_lines import DiskKeys
from tests.kit.store import (
    checksummed_parts,
    completion,
    fill,
    get,
    key,
    put,
    value,
    variant,
)

PAGE = 65536
NUM_KEYS = 6

keys = st.integers(0, NUM_KEYS - 1)
sizes = st.sampled_from([1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])


@dataclass
class UnfinishedPut:
    key: VariantKey
    raw: bytes
    incoming: object
    deletes: int


class StoreMachine(RuleBasedStateMachine):
    @initialize(
        leaves_only=st.booleans(),
        admission=st.sampled_from(["always", "second-touch"]),
        memory_pages=st.integers(4, 8),
        disk_pages=st.sampled_from([4, 8, 64]),
        encrypts=st.booleans(),
    )
    def open(
        self, leaves_only: bool, admission: str, memory_pages: int, disk_pages: int, encrypts: bool
    ) -> None:
        self.folder = Path(tempfile.mkdtemp())
        (self.folder / "disk.key").write_text("11" * 32)
        self.settings = {
            "memory_bytes": memory_pages * PAGE,
            "disk_bytes": disk_pages * PAGE,
            "admission": admission,
            "leaves_only": leaves_only,
            "policy": "lru",
            "disk_keys": DiskKeys(self.folder / "disk.key") if encrypts else None,
        }
        self.store = Store(self.folder, StoreOptions(**self.settings))  # type: ignore[arg-type]
        self.seed = 0
        self.deletes = 0
        self.allowed: dict[VariantKey, set[bytes]] = {}
        self.durable: set[VariantKey] = set()
        self.evicted = False
        self.leases: dict[int, tuple[ReadLease, bytes]] = {}
        self.unfinished: list[UnfinishedPut] = []
        self.seen: list[AsOf] = []

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self._end()
            self.store.close()
            shutil.rmtree(self.folder)

    def _end(self) -> None:
        for one in self.unfinished:
            one.incoming.abort()  # type: ignore[attr-defined]
        self.unfinished.clear()
        self.store.reads.release(self.leases)
        self.leases.clear()

    def _raw(self, size: int) -> bytes:
        self.seed += 1
        return value(size, self.seed)

    @staticmethod
    def _origin(number: int) -> Origin:
        """Every key but two is computed after the one before it."""
        if number % 3 == 0:
            return Origin()
        parent = key(number - 1)
        before = tuple(key(n).chunk for n in range(number - number % 3, number))
        return Origin(prefix_chunks=before, parent=parent)

    @rule(number=keys, size=sizes, ack=st.sampled_from(Ack), exact=st.booleans())
    def put(self, number: int, size: int, ack: Ack, exact: bool) -> None:
        raw = self._raw(size)
        try:
            outcome = put(
                self.store, key(number), raw, ack=ack, exact=exact, origin=self._origin(number)
            )
        except Unavailable:
            # A durable put may have been accepted before the disk refused.
            self.allowed.setdefault(key(number), set()).add(raw)
            return
        assert outcome in {PutOutcome.STORED, PutOutcome.ALREADY_STORED}
        if ack is Ack.DURABLE:
            self.durable.add(key(number))
        if outcome is PutOutcome.STORED:
            self.allowed.setdefault(key(number), set()).add(raw)

    @rule(number=keys, size=sizes)
    def begin(self, number: int, size: int) -> None:
        raw = self._raw(size)
        new = variant(
            key(number), raw, origin=self._origin(number), as_of=self.store.reads.lookup([]).as_of
        )
        try:
            incoming = self.store.puts.begin(new)
        except Unavailable:
            return
        if not isinstance(incoming, PutOutcome):
            self.unfinished.append(UnfinishedPut(key(number), raw, incoming, self.deletes))

    @precondition(lambda self: self.unfinished)
    @rule(whole=st.booleans())
    def end(self, whole: bool) -> None:
        one = self.unfinished.pop()
        if not whole:
            one.incoming.abort()  # type: ignore[attr-defined]
            return
        fill(one.incoming.views, one.raw)  # type: ignore[attr-defined]
        if one.incoming.commit(completion(one.incoming.new, one.raw)) is PutOutcome.STORED:  # type: ignore[attr-defined]
            self.allowed.setdefault(one.key, set()).add(one.raw)

    @rule(number=keys)
    def get(self, number: int) -> None:
        found = get(self.store, key(number))
        assert isinstance(found, Miss) or found in self.allowed.get(key(number), ())

    @rule(number=keys)
    def lease(self, number: int) -> None:
        (lease,) = self.store.reads.open([key(number)])
        if isinstance(lease, ReadLease) and len(self.leases) < 3:
            raw = self._read(lease)
            assert raw in self.allowed[key(number)]
            self.leases[lease.id] = (lease, raw)
        elif isinstance(lease, ReadLease):
            self.store.reads.release([lease.id])

    @precondition(lambda self: self.leases)
    @rule(corrupt=st.booleans())
    def release(self, corrupt: bool) -> None:
        lease_id = next(iter(self.leases))
        lease, _ = self.leases.pop(lease_id)
        self.store.reads.note_opened([lease])  # it may be deleted or replaced by now
        self.store.reads.release([lease_id], [lease_id] if corrupt else [])
        assert self.store.stats().corrupt == 0

    @rule(numbers=st.sets(keys, min_size=1, max_size=2))
    def delete(self, numbers: set[int]) -> None:
        self.seen.append(self.store.reads.lookup([]).as_of)
        self.deletes += 1
        self.store.deletes.apply([Deletion(b"", chunks=tuple(key(n).chunk for n in numbers))])
        for number in range(NUM_KEYS):
            before = {number, *range(number - number % 3, number)}
            if before & numbers:
                self.allowed.pop(key(number), None)
                self.durable.discard(key(number))
                assert get(self.store, key(number)) is Miss.DELETED or not numbers & {number}
                # A put that was planned before the delete stores nothing.
                outcome = put(
                    self.store,
                    key(number),
                    self._raw(1),
                    origin=self._origin(number),
                    as_of=self.seen[-1],
                )
                assert outcome is PutOutcome.DELETED

    @rule(number=keys)
    def prefetch(self, number: int) -> None:
        self.store.variants.prefetch([key(number)])

    @rule()
    def sweep(self) -> None:
        self.store.mover.writer.flush()
        self.store.housekeeping.sweep()

    @rule(number=keys)
    def swap(self, number: int) -> None:
        for candidate in self.store.variants.all():
            if candidate.key == key(number):
                raw = self._raw(max(1, candidate.info.num_bytes // 2))
                if self.store.variants.swap(
                    candidate.key,
                    candidate.identity,
                    candidate.info.precision,
                    checksummed_parts(raw),
                    [memoryview(raw)],
                ):
                    self.allowed[key(number)].add(raw)

    @rule(flush=st.booleans())
    def restart(self, flush: bool) -> None:
        """Stop the store, or kill it: then values that were not written are lost."""
        self._end()
        if flush:
            self.store.mover.writer.flush()
        self.store.close(flush=flush)
        self.evicted |= Tier.DISK in self.store.stats().evictions  # also while it closed
        self.store = Store(self.folder, StoreOptions(**self.settings))  # type: ignore[arg-type]
        for durable in self.durable:
            assert self.evicted or isinstance(get(self.store, durable), bytes)

    def _read(self, lease: ReadLease) -> bytes:
        raw = bytearray(lease.variant.info.num_bytes)
        if lease.on_disk:
            assert self.store.disk_tier.read_into(lease.copy.extents, [memoryview(raw)])
            return bytes(raw)
        return b"".join(self.store.memory_tier.views(lease.copy.extents))

    @invariant()
    def leased_values_stay(self) -> None:
        for lease, raw in getattr(self, "leases", {}).values():
            assert self._read(lease) == raw

    @invariant()
    def capacities_hold(self) -> None:
        if hasattr(self, "store"):
            stats = self.store.stats()
            assert stats.memory_bytes <= self.settings["memory_bytes"]  # type: ignore[operator]
            assert stats.disk_bytes <= self.settings["disk_bytes"]  # type: ignore[operator]
            for tier in Tier:
                allocator = (
                    self.store.memory_tier if tier is Tier.MEMORY else self.store.disk_tier
                ).allocator
                assert allocator.used_pages <= allocator.num_pages

    @invariant()
    def the_state_is_consistent(self) -> None:
        if hasattr(self, "store"):
            self.store.check()


StoreMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


TestStoreMachine = StoreMachine.TestCase
