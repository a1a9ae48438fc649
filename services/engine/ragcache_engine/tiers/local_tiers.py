"""The tiers of a worker, above the cache store: a pool on its device, and host memory.

The store's lookup decides what may be loaded, and these tiers save the transfer. A value never
changes and its variant names it, so a tier has the value that the lookup found, unless its metadata
differs (``LocalTiers.read``). A reader keeps the value's pages until the read ends, even if the
value is evicted.

A background thread fills the tiers, with values that loads fetched and that the worker computed. It
also moves values between the tiers. No other thread waits for it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ragcache_core.eviction.policy import EvictionCandidate
from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.identity.variant import Precision
from ragcache_core.store_api import REUSE, VariantUse
from ragcache_core.tiering.precision_assignment import Placement
from ragcache_core.tiering.tier_placement import make_tier_policy
from ragcache_engine.kv_cache.chunk_pool import ChunkPool, PoolAllocation
from ragcache_engine.kv_cache.incoming_value import OfferedValue
from ragcache_engine.protocol.messages import TierChange
from ragcache_engine.telemetry.load_counts import TierCounts
from ragcache_engine.threads import unpinned_pool
from ragcache_wire.settings import EngineSettings

log = logging.getLogger("vllm.ragcache")


TIER_NAMES = {Placement.GPU: "device", Placement.PINNED: "host"}
"""The names of the tiers in metrics and logs."""


@dataclass(slots=True, eq=False)
class TierValue:
    """A value in a tier.

    Attributes:
        offer: The offer that the value came from.
        tier: The tier that stores it.
        allocation: Its pages in the tier's pool.
        readers: Number of reads that use these pages.
        retired: Whether reads no longer find the value. Its last reader frees the pages.
    """

    offer: OfferedValue
    tier: Placement
    allocation: PoolAllocation
    readers: int = 0
    retired: bool = False


class TierRead:
    """A read of a value. The tier does not change the bytes until the read is closed or collected.

    The device must have finished its copies by then.
    """

    def __init__(
        self, pool: ChunkPool, value: TierValue, on_close: Callable[[TierValue], None]
    ) -> None:
        self._pool = pool
        self._value = value
        self._finalizer = weakref.finalize(self, on_close, value)
        self._finalizer.atexit = False

    @property
    def tier(self) -> str:
        """Name of the tier that stores the value."""
        return TIER_NAMES[self._value.tier]

    @property
    def precision(self) -> Precision:
        """The precision that the store had the value in."""
        return self._value.offer.info.precision

    def pieces(self, start: int, end: int) -> Sequence[torch.Tensor]:
        """Return views of tokens [start, end), in order; see ``ChunkPool.views``."""
        return self._pool.views(self._value.allocation, start, end)

    def close(self) -> None:
        """End the read. More calls have no effect."""
        self._finalizer()


QUEUE_SHARE = 1 / 4
"""Offers that wait to be copied use memory of their own: at most this share of the tiers' limits,
or one value. The tiers drop further offers, and the next load fetches these from the store."""

_SWAP_SHARE = 1 / 16
"""Share of host memory that stays free if there is a device pool, so that values can swap tiers."""


class LocalTiers:
    """A worker's tiers. Thread-safe.

    Args:
        pools: The pool of each tier. Empty: no value is stored.
        policy: Name of the tier policy.
        on_reads: Called with the variants that were read here and how they were used, on the
            background thread. Without it, the store would not learn that these variants are hot.
        clock: Returns seconds.
    """

    def __init__(
        self,
        pools: Mapping[Placement, ChunkPool],
        policy: str,
        on_reads: Callable[[Sequence[tuple[VariantKey, VariantUse]]], None] = lambda uses: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools = {tier: pool for tier, pool in pools.items() if pool.capacity_bytes}
        limits = {tier: pool.capacity_bytes for tier, pool in self._pools.items()}
        self._max_queued_bytes = int(sum(limits.values()) * QUEUE_SHARE)
        if len(limits) > 1:
            limits[Placement.PINNED] -= int(limits[Placement.PINNED] * _SWAP_SHARE)
        self._policy = make_tier_policy(policy, limits)
        self._on_reads = on_reads
        self._clock = clock
        self._lock = threading.Lock()
        self._values: dict[bytes, TierValue] = {}
        self._offers: list[OfferedValue] = []
        self._queued_bytes = 0
        self._reads: list[tuple[VariantKey, VariantUse]] = []
        self._evicted: Counter[str] = Counter()
        self._reported_bytes: dict[str, int] = {}
        self._changes: dict[VariantKey, TierChange | None] = {}
        # A queue, because a read may end in the garbage collector, which can interrupt the thread
        # that has the lock.
        self._closed_reads: queue.SimpleQueue[TierValue] = queue.SimpleQueue()
        self._thread = unpinned_pool(1, "ragcache-tier")
        self._rebalancing = False

    @property
    def has_memory(self) -> bool:
        """Whether there is any tier."""
        return bool(self._pools)

    def read(
        self,
        key: VariantKey,
        num_tokens: int,
        base_position: int,
        domain: str,
        *,
        exact: bool,
        use: VariantUse = REUSE,
    ) -> TierRead | None:
        """Start a read of a value.

        Args:
            key: The variant.
            num_tokens: Its length.
            base_position: Position of its first token when it was computed.
            domain: The reader's access domain.
            exact: Whether the value must serve ``exact`` reuse.
            use: How the reader uses the variant.

        Returns:
            None if no tier has such a value; the caller asks the store.
        """
        with self._lock:
            value = self._values.get(key.to_bytes())
            if value is None:
                return None
            offer = value.offer
            if (offer.info.num_tokens, offer.info.base_position) != (num_tokens, base_position):
                return None
            if offer.domain != domain or (exact and not offer.info.serves_exact):
                return None
            value.readers += 1
            self._reads.append((key, use))
        return TierRead(self._pools[value.tier], value, self._closed_reads.put)

    def offer(self, offers: Iterable[OfferedValue]) -> None:
        """Queue values for the tiers; ``start_rebalance`` stores them."""
        with self._lock:
            for offer in offers:
                queued = self._queued_bytes + offer.num_bytes
                fits = queued <= self._max_queued_bytes or not self._queued_bytes
                if self._pools and fits and self._is_better(offer):
                    self._offers.append(offer)
                    self._queued_bytes += offer.num_bytes

    def start_rebalance(self) -> None:
        """Store offers and move values in the background; returns at once."""
        with self._lock:
            if self._rebalancing or not self._pools or not (self._offers or self._reads):
                return
            self._rebalancing = True
        try:
            self._thread.submit(self._rebalance)
        except RuntimeError:  # no thread can be started, or the engine is ending
            with self._lock:
                self._rebalancing = False

    def take_counts(self) -> TierCounts:
        """Return the evictions and the changed sizes since the last call."""
        with self._lock:
            self._free_closed_reads()
            evicted, self._evicted = self._evicted, Counter()
            used = {TIER_NAMES[tier]: pool.used_bytes for tier, pool in self._pools.items()}
            changed = {
                name: now for name, now in used.items() if now != self._reported_bytes.get(name)
            }
            self._reported_bytes = used
        return TierCounts(evicted, changed)

    def take_changes(self) -> Mapping[VariantKey, TierChange | None]:
        """Return the new tier of each value that moved since the last call; None: none."""
        with self._lock:
            changes, self._changes = self._changes, {}
        return changes

    def close(self) -> None:
        """Stop storing values."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent. Call it while no value moves."""
        with self._lock:
            self._free_closed_reads()
            for tier, pool in self._pools.items():
                pool.check()
                assert pool.used_bytes <= pool.capacity_bytes
                stored = [value for value in self._values.values() if value.tier is tier]
                used = sum(pool.bytes_for(value.offer.info.num_tokens) for value in stored)
                assert used <= pool.used_bytes
                assert any(value.readers for value in stored) or used == pool.used_bytes

    def _is_better(self, offer: OfferedValue) -> bool:
        """Tell whether an offer is better than the stored value. Needs the lock."""
        value = self._values.get(offer.key.to_bytes())
        if value is None:
            return True
        if offer.info.serves_exact != value.offer.info.serves_exact:
            return offer.info.serves_exact
        return offer.info.base_position != value.offer.info.base_position

    # On the background thread, which alone changes where values are stored.

    def _rebalance(self) -> None:
        try:
            while True:
                with self._lock:
                    offers, self._offers = self._offers, []
                    reads, self._reads = self._reads, []
                    self._rebalancing = bool(offers or reads)
                if not (offers or reads):
                    return
                try:
                    self._rebalance_once(offers, reads)
                finally:
                    with self._lock:
                        self._queued_bytes -= sum(offer.num_bytes for offer in offers)
        except Exception:
            log.exception("local tiers: rebalance aborted")
            with self._lock:
                self._rebalancing = False

    def _rebalance_once(
        self, offers: Sequence[OfferedValue], reads: Sequence[tuple[VariantKey, VariantUse]]
    ) -> None:
        now = self._clock()
        for key, _ in reads:
            self._policy.record_use(key.to_bytes(), now)
        largest = max(self._pools.values(), key=lambda pool: pool.capacity_bytes)
        offered: dict[bytes, OfferedValue] = {}
        for offer in offers:
            size = largest.bytes_for(offer.info.num_tokens)
            if size <= largest.capacity_bytes:
                candidate: EvictionCandidate[bytes] = EvictionCandidate(
                    size, offer.info.num_tokens, cost_s=0.0
                )
                self._policy.add(offer.key.to_bytes(), candidate, now)
                offered[offer.key.to_bytes()] = offer
        assigned = self._policy.assign_tiers(now)
        current = {name: value.tier for name, value in self._values.items()}
        fastest = self._pools.get(Placement.GPU) or self._pools[Placement.PINNED]
        with fastest.side_stream():
            self._apply(plan_tier_moves(assigned, current, offered), offered)
        if reads:
            self._on_reads(reads)

    def _apply(self, moves: TierMoves, offered: Mapping[bytes, OfferedValue]) -> None:
        """Apply moves. A value that cannot move now stays where it is until the next time."""
        for name in moves.evicted:
            self._remove(name, evicted=True)
        for name in moves.replaced:
            self._remove(name, evicted=False)
        for name in moves.unavailable:
            self._policy.remove(name)
        left = dict(moves.copies)
        while left:
            done = [name for name, tier in left.items() if self._copy_to(tier, name, offered)]
            # No copy has room if values block each other, or if readers use the pages. Then the
            # demotions become evictions: the store still has these values.
            if not done:
                done = self._evict_demotions(left)
            if not done:
                break
            for name in done:
                del left[name]
        for name in left:
            if name not in self._values:
                self._policy.remove(name)

    def _evict_demotions(self, copies: Mapping[bytes, Placement]) -> list[bytes]:
        """Evict the values that should move to host memory; return their names."""
        names = [
            name
            for name, tier in copies.items()
            if tier is Placement.PINNED and name in self._values
        ]
        for name in names:
            self._policy.remove(name)
            self._remove(name, evicted=True)
        return names

    def _copy_to(self, tier: Placement, name: bytes, offered: Mapping[bytes, OfferedValue]) -> bool:
        """Copy a value, or the value of an offer, to a tier.

        Returns:
            False if the tier has no room. True if the value was copied, or if its offer has failed
            and the policy has forgotten it.
        """
        pool, value = self._pools[tier], self._values.get(name)
        offer = offered[name] if value is None else value.offer
        with self._lock:
            self._free_closed_reads()
            allocation = pool.allocate(offer.info.num_tokens)
        if allocation is None:
            return False
        try:
            if value is None:
                native = offer.native()
                pieces: Sequence[torch.Tensor] = () if native is None else (native,)
            else:
                pieces = self._pools[value.tier].views(value.allocation, 0, offer.info.num_tokens)
            pool.fill(allocation, pieces)
        except BaseException as error:
            variant = offer.key.to_bytes().hex()
            log.warning(
                "%s tier: insert failed variant=%s error=%s", TIER_NAMES[tier], variant, error
            )
            with self._lock:
                pool.free(allocation)
            raise
        with self._lock:
            if not pieces:
                pool.free(allocation)
                self._policy.remove(name)
                return True
            # The tier does not need the offer's own memory any more.
            stored = replace(offer, native=lambda: None)
            self._values[name] = TierValue(stored, tier, allocation)
            self._changes[offer.key] = TierChange(TIER_NAMES[tier], offer.info.serves_exact)
            if value is not None:
                self._retire(value)
        return True

    def _remove(self, name: bytes, *, evicted: bool) -> None:
        """Remove a value from its tier."""
        with self._lock:
            value = self._values.pop(name)
            self._changes[value.offer.key] = None
            self._retire(value)
            if evicted:
                self._evicted[TIER_NAMES[value.tier]] += 1

    def _retire(self, value: TierValue) -> None:
        """Free a value's pages, or leave that to its last reader. Needs the lock."""
        value.retired = True
        if not value.readers:
            self._pools[value.tier].free(value.allocation)

    def _free_closed_reads(self) -> None:
        """Free the pages of retired values whose last read has ended. Needs the lock."""
        while not self._closed_reads.empty():
            value = self._closed_reads.get()
            value.readers -= 1
            if value.retired and not value.readers:
                self._pools[value.tier].free(value.allocation)


def make_local_tiers(
    settings: EngineSettings,
    space: KVSpace,
    device: torch.device,
    on_reads: Callable[[Sequence[tuple[VariantKey, VariantUse]]], None],
) -> LocalTiers:
    """Build the configured tiers. A tier without enough memory is off, with a warning."""
    configured = {
        Placement.GPU: (settings.device_pool_bytes, device),
        Placement.PINNED: (settings.host_tier_bytes, torch.device("cpu")),
    }
    pools = {}
    for tier, (limit_bytes, where) in configured.items():
        if limit_bytes:
            try:
                pools[tier] = ChunkPool(space, limit_bytes, where)
            except (RuntimeError, MemoryError) as error:
                log.warning(
                    "%s tier: off, cannot allocate memory error=%s", TIER_NAMES[tier], error
                )
    return LocalTiers(pools, settings.tier_policy, on_reads)


@dataclass(slots=True)
class TierMoves:
    """What must change so that each value is in its assigned tier. Apply the fields in this order.

    Attributes:
        evicted: Variants that leave their tier, and no tier stores them afterwards.
        replaced: Variants that leave their tier because an offer has a newer value. A variant that
            is assigned to no tier is dropped.
        unavailable: Variants that the policy assigned to a tier, but that have neither a stored
            value nor an offer. The policy must forget them.
        copies: The target tier of each variant to copy, demotions first.
    """

    evicted: list[bytes] = field(default_factory=list)
    replaced: list[bytes] = field(default_factory=list)
    unavailable: list[bytes] = field(default_factory=list)
    copies: dict[bytes, Placement] = field(default_factory=dict)


def plan_tier_moves(
    assigned: Mapping[bytes, Placement],
    current: Mapping[bytes, Placement],
    offered: Collection[bytes],
) -> TierMoves:
    """Compare the assigned tier of each variant with its current one.

    Invariant: demotions come first, because they make room for promotions. So ``copies`` has all
    copies to host memory before those to the device.

    Args:
        assigned: The policy's tier of each variant. ``Placement.DISK``: in no tier of the worker.
        current: The tier that stores a variant now.
        offered: Variants for which there is a new value.
    """
    moves = TierMoves()
    copies: dict[bytes, Placement] = {}
    for name, tier in assigned.items():
        stored_in, is_offered = current.get(name), name in offered
        if stored_in is not None and is_offered:
            moves.replaced.append(name)
        elif stored_in is not None and tier is Placement.DISK:
            moves.evicted.append(name)
        elif stored_in is None and tier is not Placement.DISK and not is_offered:
            moves.unavailable.append(name)
            continue
        if tier is not Placement.DISK and (is_offered or stored_in is not tier):
            copies[name] = tier
    demotions = {name: tier for name, tier in copies.items() if tier is Placement.PINNED}
    moves.copies = demotions | copies
    return moves
