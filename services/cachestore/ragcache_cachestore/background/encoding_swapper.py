"""Replaces the value of a stored variant by the same value in another encoding."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from ragcache_cachestore.background.tier_mover import TierMover
from ragcache_cachestore.state.catalog import CatalogVariant
from ragcache_cachestore.state.store_state import StoreState
from ragcache_cachestore.storage.memory_tier import MemoryTier
from ragcache_core.errors import Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Precision, ValuePart, VariantInfo

log = logging.getLogger(__name__)


class EncodingSwapper:
    """Swaps encodings in both tiers. Safe to call from any thread."""

    def __init__(self, state: StoreState, memory_tier: MemoryTier, mover: TierMover) -> None:
        self._state = state
        self._memory_tier = memory_tier
        self._mover = mover

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
