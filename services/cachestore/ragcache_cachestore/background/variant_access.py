"""Access to single variants for the background tasks: the re-encoder and the replicator."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ragcache_cachestore.background.tier_mover import TierMover
from ragcache_cachestore.state.catalog import CatalogVariant
from ragcache_cachestore.state.store_state import StoreState
from ragcache_cachestore.storage.memory_tier import MemoryTier
from ragcache_core.errors import Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Precision, ValuePart, VariantInfo
from ragcache_core.store_api import NewVariant
from ragcache_kv.values.outgoing_value import ReadyValue

log = logging.getLogger(__name__)


LOSSY_READERS_S = 3600.0
"""How long the re-encoder makes lossy values after the last reader that may use them."""


class VariantAccess:
    """Reads, annotates and re-encodes variants. Its reads count neither as hits nor as misses."""

    def __init__(self, state: StoreState, memory_tier: MemoryTier, mover: TierMover) -> None:
        self._state = state
        self._memory_tier = memory_tier
        self._mover = mover

    def all(self) -> Iterator[CatalogVariant]:
        """Yield every stored variant."""
        return self._state.in_batches()

    def children(self, min_age_s: float) -> Iterator[tuple[VariantKey, VariantKey]]:
        """Yield each variant of this age that has a parent, with the parent."""
        put_before = self._state.clock() - min_age_s
        for variant in self._state.in_batches():
            if variant.origin.parent is not None and variant.put_at <= put_before:
                yield variant.key, variant.origin.parent

    def read(self, key: VariantKey, identity: int) -> bytearray | None:
        """Return a copy of a value, or None if the variant was replaced or is corrupt."""
        with self._state.lock:
            variant = self._state.catalog.get(key)
        if variant is None or variant.identity != identity:
            return None
        return self._mover.read_copy(variant)

    def export(self, key: VariantKey) -> tuple[NewVariant, ReadyValue] | None:
        """Return a copy of a value and what a put of it needs, or None if it is not stored."""
        with self._state.lock:
            variant = self._state.catalog.get(key)
        value = None if variant is None else self._mover.read_copy(variant)
        if variant is None or value is None:
            return None
        new = NewVariant(
            key=key,
            info=variant.info,
            part_bytes=tuple([part.num_bytes for part in variant.parts]),
            origin=replace(variant.origin, cost_s=0.0),
            shape=variant.shape,
            value_format=variant.value_format,
        )
        checksums = [part.checksum for part in variant.parts]
        return new, ReadyValue(memoryview(value), checksums, variant.origin.cost_s, variant.tag)

    def has_lossy_readers(self) -> bool:
        """Whether a client that may use lossy values has looked for any lately."""
        asked_at = self._state.lossy_lookup_at
        return asked_at is not None and self._state.clock() - asked_at < LOSSY_READERS_S

    def set_wants_higher_precision(self, key: VariantKey, wanted: bool) -> None:
        """Set whether lookups report that a variant wants a higher precision."""
        with self._state.lock:
            variant = self._state.catalog.get(key)
            if variant is not None:
                variant.wants_higher_precision = wanted

    def set_copies(self, key: VariantKey, shards: tuple[str, ...]) -> None:
        """Set the other shards that lookups report, until the variant is dropped."""
        with self._state.lock:
            if shards and self._state.catalog.get(key) is not None:
                self._state.copies[key] = shards
            else:
                self._state.copies.pop(key, None)

    def prefetch(self, keys: Sequence[VariantKey], hold_s: float = 0.0) -> int:
        """Queue promotions of values on disk. Return how many were queued.

        Args:
            keys: The variants. Those that are not stored are ignored.
            hold_s: Time for which no tier evicts them, within the bounds of ``WaitingHolds``.
        """
        with self._state.lock:
            self._state.expire()
            found = [one for one in map(self._state.find, dict.fromkeys(keys)) if one is not None]
            if hold_s > 0:
                for variant in found:
                    self._state.hold(variant, hold_s)
            on_disk = [one for one in found if one.memory is None]
        return sum([self._mover.promoter.submit(variant, now=True) for variant in on_disk])

    def swap(
        self,
        key: VariantKey,
        identity: int,
        precision: Precision,
        parts: Sequence[ValuePart],
        views: Sequence[memoryview],
    ) -> bool:
        """Store a value in another encoding, unless the variant was replaced or is being read.

        Args:
            views: The bytes of each part.

        Returns:
            False if nothing was changed.
        """
        with self._state.lock:
            old = self._state.find_swappable(key, identity)
        if old is None:
            return False
        num_bytes = sum([part.num_bytes for part in parts])
        info = replace(old.info, num_bytes=num_bytes, precision=precision)
        try:
            if old.disk is None and old.superseded is None:
                return self._swap_in_memory(old, info, tuple(parts), views)
            return self._swap_on_disk(old, info, tuple(parts), views)
        except Unavailable as error:
            log.info(
                "re-encoder: value keeps its encoding variant=%s error=%s",
                key.to_bytes().hex(),
                error,
            )
            return False
        finally:
            self._mover.try_free_dropped_copies()

    def _swap_in_memory(
        self,
        old: CatalogVariant,
        info: VariantInfo,
        parts: tuple[ValuePart, ...],
        views: Sequence[memoryview],
    ) -> bool:
        with self._state.lock:
            copy = self._mover.try_allocate_in_memory(info.num_bytes)
        if copy is None:
            return False
        fill(self._memory_tier.views(copy.extents), views)
        with self._state.lock:
            if self._state.find_swappable(old.key, old.identity) is not old or old.memory is None:
                self._state.memory.release(copy)
                return False
            variant = self._state.make_successor(old, info, parts)
            variant.memory = copy
            self._state.install(variant, old, self._state.clock(), used=False)
            self._state.memory_freed.notify_all()
        return True

    def _swap_on_disk(
        self,
        old: CatalogVariant,
        info: VariantInfo,
        parts: tuple[ValuePart, ...],
        views: Sequence[memoryview],
    ) -> bool:
        """Write the new value to disk first, so that a durable value is always on disk."""
        with self._state.lock:
            variant = self._state.make_successor(old, info, parts)
            old_copy = old.disk
            if old_copy is not None:
                old_copy.ref_count += 1  # allocation must not evict the copy that is replaced
            if old.memory is not None:
                variant.memory = self._mover.try_allocate_in_memory(info.num_bytes)
        swapped = False
        try:
            if variant.memory is not None:
                fill(self._memory_tier.views(variant.memory.extents), views)
            copy = self._mover.allocate_on_disk(info.num_bytes)
            if not self._mover.write_value(variant, copy, views, old):
                return False
            with self._state.lock:
                swapped = self._state.catalog.contains(old)
                if swapped:
                    variant.disk = copy
                    self._state.install(variant, old, self._state.clock(), used=False)
                else:
                    self._state.drop_disk_copy(old.key, copy)
        finally:
            with self._state.lock:
                if old_copy is not None:
                    self._state.disk.release(old_copy)
                if not swapped and variant.memory is not None:
                    self._state.memory.release(variant.memory)
                self._state.memory_freed.notify_all()
        return swapped


def fill(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
    """Copy sources one after another into targets, which are large enough."""
    rest = list(targets)
    for source in sources:
        left = source.cast("B") if source.nbytes else memoryview(b"")
        while len(left):
            taken = min(len(rest[0]), len(left))
            rest[0][:taken] = left[:taken]
            rest[0], left = rest[0][taken:], left[taken:]
            if not len(rest[0]):
                del rest[0]
