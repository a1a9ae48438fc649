"""Recovery at start: loads the metadata and the deletes of a data folder into the state."""

from __future__ import annotations

import contextlib
import logging

from ragcache_cachestore.background.tier_mover import TierMover
from ragcache_cachestore.state.catalog import CatalogVariant
from ragcache_cachestore.state.store_state import StoreState
from ragcache_cachestore.state.tombstones import AWAY_MS, Tombstones
from ragcache_cachestore.storage.disk_tier import DiskTier
from ragcache_cachestore.storage.disk_variant import DiskVariant
from ragcache_cachestore.storage.metadata_db import MetadataDb
from ragcache_cachestore.storage.tier_space import TierCopy
from ragcache_core.errors import Unavailable
from ragcache_core.identity.keys import VariantKey

log = logging.getLogger(__name__)


def recover(
    state: StoreState, mover: TierMover, metadata: MetadataDb, disk_tier: DiskTier, now_ms: int
) -> None:
    """Load a data folder.

    A folder that was away for longer than deletes live is emptied first, because it may have
    missed some.

    Args:
        now_ms: Unix time in milliseconds.
    """
    away_ms = now_ms - metadata.last_alive_ms
    if metadata.last_alive_ms and away_ms > AWAY_MS:
        log.warning(
            "recovery: dropped all values, because deletes may be missed away_h=%.0f",
            away_ms / 3.6e6,
        )
        metadata.clear_variants()
    with contextlib.suppress(Unavailable):  # a full disk can still be read
        metadata.note_alive(now_ms)
    state.tombstones = Tombstones.recovered(
        metadata.tombstones(), metadata.delete_sequence, metadata.forgotten, state.steady
    )
    now = state.clock()
    for key, found in metadata.load(disk_tier.allocator):
        _recover_variant(state, mover, key, found, now)
    mover.try_free_dropped_copies()


def _recover_variant(
    state: StoreState, mover: TierMover, key: VariantKey, found: DiskVariant, now: float
) -> None:
    copy = TierCopy(found.extents, found.info.num_bytes)
    state.next_identity = max(state.next_identity, found.put_order + 1)
    mover.note_recorded(key, copy)
    # Before a delete is forgotten, what it covers is removed from disk.
    seen = max(found.delete_sequence, state.tombstones.forgotten_sequence)
    if state.tombstones.covers(key, found.origin, seen):
        state.drop_disk_copy(key, copy)
        return
    variant = CatalogVariant(
        key=key,
        identity=found.put_order,
        info=found.info,
        parts=found.parts,
        origin=found.origin,
        shape=found.shape,
        value_format=found.value_format,
        delete_sequence=found.delete_sequence,
        put_at=now,
        disk=copy,
    )
    state.catalog.add(variant)
    state.disk.policy.add(key, variant.eviction_candidate, now)
