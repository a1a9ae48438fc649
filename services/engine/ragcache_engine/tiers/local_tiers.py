"""Values that a worker holds itself, above the cache store: on its device, and in host memory.

The store's lookup decides what may be loaded; what is here saves the way. A value never changes and
is named by its variant, so that what a lookup found is what is here, unless it says otherwise
(``LocalTiers.read``). Whoever reads one keeps its room until the read is over, evicted or not.

Nobody waits for a tier to be filled: what loads have brought, and what the worker has computed, is
copied in by a thread of its own, and so is what moves between the tiers.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ragcache_core.eviction.policy import EvictionCandidate
from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.identity.variant import VariantInfo
from ragcache_core.tiering.precision_assignment import Placement
from ragcache_core.tiering.tier_placement import make_tier_policy
from ragcache_engine.config import EngineConfig
from ragcache_engine.kv_cache.chunk_pool import ChunkPool, PoolAllocation
from ragcache_engine.telemetry.load_counts import TierCounts
from ragcache_engine.threads import unpinned_pool

log = logging.getLogger("vllm.ragcache")

TIER_NAMES = {Placement.GPU: "device", Placement.PINNED: "host"}
"""As metrics and logs call the memories that ``hotness.placement`` gives out."""

WAITING_SHARE = 4
"""Values that wait to be copied in hold memory of their own: one part in so many of the limits, or
one value, at most. What is beyond that is not kept, and comes from the store the next time too."""

_SWAP_SHARE = 16
"""Of the host's memory, where there is a device's: free, so that values can change places."""


@dataclass(frozen=True, slots=True)
class OfferedValue:
    """A value that could be kept.

    base_position, serves_exact: as ``VariantInfo`` has them. native: makes or has the value,
    [num_layers, 2, num_tokens, num_kv_heads, head_dim] on the CPU; None if that fails. num_bytes:
    that it holds until then.
    """

    key: VariantKey
    num_tokens: int
    num_bytes: int
    base_position: int
    serves_exact: bool
    domain: str
    native: Callable[[], torch.Tensor | None]

    @classmethod
    def of(
        cls,
        key: VariantKey,
        info: VariantInfo,
        num_bytes: int,
        domain: str,
        native: Callable[[], torch.Tensor | None],
    ) -> OfferedValue:
        """Of a variant as a store holds it, or as it was computed."""
        base, exact = info.base_position, info.serves_exact
        return cls(key, info.num_tokens, num_bytes, base, exact, domain, native)


@dataclass(slots=True, eq=False)
class _Entry:
    """A value in a tier. readers: who keep its room. retired: it is not to be found any more."""

    offer: OfferedValue
    memory: Placement
    room: PoolAllocation
    readers: int = 0
    retired: bool = False


class TierRead:
    """A value that is being read: its bytes stay as they are until this is closed or forgotten.

    What a device was told to do with them has to be done by then.
    """

    def __init__(self, pool: ChunkPool, entry: _Entry, leave: Callable[[_Entry], None]) -> None:
        self._pool = pool
        self._entry = entry
        self._finalizer = weakref.finalize(self, leave, entry)
        self._finalizer.atexit = False

    @property
    def tier(self) -> str:
        """Name of the tier that it is in."""
        return TIER_NAMES[self._entry.memory]

    def pieces(self, start: int, end: int) -> Sequence[torch.Tensor]:
        """Tokens [start, end) where they lie, in order; see ``ChunkPool.views``."""
        return self._pool.views(self._entry.room, start, end)

    def close(self) -> None:
        """The read is over. Any number of times."""
        self._finalizer()


class LocalTiers:
    """A worker's tiers. Safe for threads.

    pools: by memory, of ``hotness.placement.MEMORIES``; none: nothing is kept. policy: its name.
    used: told of keys that were read here, on the thread that moves values: nobody else knows that
    they are hot. clock: in seconds.
    """

    def __init__(
        self,
        pools: Mapping[Placement, ChunkPool],
        policy: str,
        used: Callable[[Sequence[VariantKey]], None] = lambda keys: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools = {memory: pool for memory, pool in pools.items() if pool.capacity_bytes}
        limits = {memory: pool.capacity_bytes for memory, pool in self._pools.items()}
        self._waiting_limit = sum(limits.values()) // WAITING_SHARE
        if len(limits) > 1:
            limits[Placement.PINNED] -= limits[Placement.PINNED] // _SWAP_SHARE
        self._policy = make_tier_policy(policy, limits)
        self._used = used
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._offers: list[OfferedValue] = []
        self._waiting_bytes = 0
        self._reads: list[VariantKey] = []
        self._evicted: Counter[str] = Counter()
        self._told: dict[str, int] = {}
        self._changed: dict[VariantKey, str | None] = {}
        # Reads may end anywhere, also in a collector that interrupts whoever has the lock.
        self._left: queue.SimpleQueue[_Entry] = queue.SimpleQueue()
        self._mover = unpinned_pool(1, "ragcache-tier")
        self._moving = False

    @property
    def keeps(self) -> bool:
        """Whether there is any memory."""
        return bool(self._pools)

    def read(
        self, key: VariantKey, num_tokens: int, base_position: int, domain: str, *, exact: bool
    ) -> TierRead | None:
        """A value as it is wanted, or None: the store is to be asked.

        base_position: where its first token stood when it was computed. exact: it is to stand for a
        computation, so it has to be one, held without loss.
        """
        with self._lock:
            entry = self._entries.get(key.to_bytes())
            if entry is None:
                return None
            offer = entry.offer
            if (offer.num_tokens, offer.base_position) != (num_tokens, base_position):
                return None
            if offer.domain != domain or (exact and not offer.serves_exact):
                return None
            entry.readers += 1
            self._reads.append(key)
        return TierRead(self._pools[entry.memory], entry, self._left.put)

    def offer(self, offers: Iterable[OfferedValue]) -> None:
        """Take note of values that could be kept; returns at once, ``settle`` sees to them."""
        with self._lock:
            for offer in offers:
                waiting = self._waiting_bytes + offer.num_bytes
                fits = waiting <= self._waiting_limit or not self._waiting_bytes
                if self._pools and fits and self._is_news(offer):
                    self._offers.append(offer)
                    self._waiting_bytes += offer.num_bytes

    def settle(self) -> None:
        """Have values put where they belong, in the background; returns at once."""
        with self._lock:
            if self._moving or not self._pools or not (self._offers or self._reads):
                return
            self._moving = True
        try:
            self._mover.submit(self._move)
        except RuntimeError:  # no thread can be started, or the engine is ending
            with self._lock:
                self._moving = False

    def take_counts(self) -> TierCounts:
        """What became of values since the last call."""
        with self._lock:
            self._free_left()
            evicted, self._evicted = self._evicted, Counter()
            held = {TIER_NAMES[m]: pool.used_bytes for m, pool in self._pools.items()}
            changed = {name: now for name, now in held.items() if now != self._told.get(name)}
            self._told = held
        return TierCounts(evicted, changed)

    def take_changes(self) -> Mapping[VariantKey, str | None]:
        """Values that have come to a tier since the last call, by its name, or left all: None."""
        with self._lock:
            changed, self._changed = self._changed, {}
        return changed

    def close(self) -> None:
        """Keep nothing more."""
        self._mover.shutdown(wait=False, cancel_futures=True)

    def check(self) -> None:
        """Raise AssertionError if the books do not balance. For when nothing moves."""
        with self._lock:
            self._free_left()
            for memory, pool in self._pools.items():
                pool.check()
                assert pool.used_bytes <= pool.capacity_bytes
                held = [e for e in self._entries.values() if e.memory is memory]
                used = sum(pool.bytes_for(entry.offer.num_tokens) for entry in held)
                assert used <= pool.used_bytes
                assert any(e.readers for e in held) or used == pool.used_bytes

    def _is_news(self, offer: OfferedValue) -> bool:
        """Whether an offer is better than what is held. Under the lock."""
        entry = self._entries.get(offer.key.to_bytes())
        if entry is None:
            return True
        if offer.serves_exact != entry.offer.serves_exact:
            return offer.serves_exact
        return offer.base_position != entry.offer.base_position

    # On the mover's thread, which alone changes where values are.

    def _move(self) -> None:
        try:
            while True:
                with self._lock:
                    offers, self._offers = self._offers, []
                    reads, self._reads = self._reads, []
                    self._moving = bool(offers or reads)
                if not (offers or reads):
                    return
                try:
                    self._see_to(offers, reads)
                finally:
                    with self._lock:
                        self._waiting_bytes -= sum(offer.num_bytes for offer in offers)
        except Exception:
            log.exception("values were not kept")
            with self._lock:
                self._moving = False

    def _see_to(self, offers: Sequence[OfferedValue], reads: Sequence[VariantKey]) -> None:
        now = self._clock()
        for key in reads:
            self._policy.use(key.to_bytes(), now)
        largest = max(self._pools.values(), key=lambda pool: pool.capacity_bytes)
        fresh: dict[bytes, OfferedValue] = {}
        for offer in offers:
            size = largest.bytes_for(offer.num_tokens)
            if size <= largest.capacity_bytes:
                candidate: EvictionCandidate[bytes] = EvictionCandidate(
                    size, offer.num_tokens, cost_s=0.0
                )
                self._policy.add(offer.key.to_bytes(), candidate, now)
                fresh[offer.key.to_bytes()] = offer
        fastest = self._pools.get(Placement.GPU) or self._pools[Placement.PINNED]
        with fastest.beside():
            self._place(self._policy.place(now), fresh)
        if reads:
            self._used(reads)

    def _place(self, placed: Mapping[bytes, Placement], fresh: dict[bytes, OfferedValue]) -> None:
        """Bring every value to its place. fresh: those that are in none, or are to be replaced."""
        wanted: dict[bytes, Placement] = {}
        for name, memory in placed.items():
            entry = self._entries.get(name)
            if entry is not None and (memory is Placement.DISK or name in fresh):
                self._retire(name, entry, evicted=name not in fresh)
                entry = None
            if memory is Placement.DISK:
                fresh.pop(name, None)
            elif entry is None and name not in fresh:  # what was to be made of it has failed
                self._policy.remove(name)
            elif entry is None or entry.memory is not memory:
                wanted[name] = memory
        while wanted:
            # Down first: that makes room for what goes up.
            down = [name for name, memory in wanted.items() if memory is Placement.PINNED]
            moved = [n for n in dict.fromkeys([*down, *wanted]) if self._bring(n, wanted[n], fresh)]
            # Where all are in each other's way, or in that of readers, what was to go down goes
            # altogether: the store has it.
            dropped = [] if moved else [name for name in down if name in self._entries]
            for name in dropped:
                self._policy.remove(name)
                self._retire(name, self._entries[name], evicted=True)
            if not (moved or dropped):
                break
            for name in (*moved, *dropped):
                del wanted[name]
        for name in wanted:
            if name not in self._entries:  # else it stays where it is until the next time
                self._policy.remove(name)

    def _bring(self, name: bytes, memory: Placement, fresh: Mapping[bytes, OfferedValue]) -> bool:
        """Copy a value to a memory; False if that has no room. One that cannot be made is gone."""
        pool, entry = self._pools[memory], self._entries.get(name)
        offer = fresh[name] if entry is None else entry.offer
        with self._lock:
            self._free_left()
            room = pool.allocate(offer.num_tokens)
        if room is None:
            return False
        try:
            if entry is None:
                value = offer.native()
                pieces: Sequence[torch.Tensor] = () if value is None else (value,)
            else:
                pieces = self._pools[entry.memory].views(entry.room, 0, offer.num_tokens)
            pool.fill(room, pieces)
        except BaseException:
            with self._lock:
                pool.free(room)
            raise
        with self._lock:
            if not pieces:
                pool.free(room)
                self._policy.remove(name)
                return True
            # What it was made of is not needed any more.
            self._entries[name] = _Entry(replace(offer, native=lambda: None), memory, room)
            self._changed[offer.key] = TIER_NAMES[memory]
            if entry is not None:
                self._let_go(entry)
        return True

    def _retire(self, name: bytes, entry: _Entry, *, evicted: bool) -> None:
        with self._lock:
            del self._entries[name]
            self._changed[entry.offer.key] = None
            self._let_go(entry)
            if evicted:
                self._evicted[TIER_NAMES[entry.memory]] += 1

    def _let_go(self, entry: _Entry) -> None:
        """Nobody finds it any more; its room is free when nobody reads it. Under the lock."""
        entry.retired = True
        if not entry.readers:
            self._pools[entry.memory].free(entry.room)

    def _free_left(self) -> None:
        """See to reads that have ended. Under the lock."""
        while not self._left.empty():
            entry = self._left.get()
            entry.readers -= 1
            if entry.retired and not entry.readers:
                self._pools[entry.memory].free(entry.room)


def make_local_tiers(
    config: EngineConfig,
    space: KVSpace,
    device: torch.device,
    used: Callable[[Sequence[VariantKey]], None],
) -> LocalTiers:
    """The tiers that a worker is given. Memory that is not there is done without, with a word."""
    wanted = {
        Placement.GPU: (config.device_pool_bytes, device),
        Placement.PINNED: (config.host_tier_bytes, torch.device("cpu")),
    }
    pools = {}
    for memory, (limit_bytes, where) in wanted.items():
        if limit_bytes:
            try:
                pools[memory] = ChunkPool(space, limit_bytes, where)
            except (RuntimeError, MemoryError) as error:
                log.warning("the %s tier is off: %s", TIER_NAMES[memory], error)
    return LocalTiers(pools, config.tier_policy, used)
