"""The answers of several shards to one lookup."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ragcache_core.identity.keys import VariantKey
from ragcache_core.store_api import AsOf, ChunkVariants, StoredVariant

NO_SHARDS = "it has no shards"


@dataclass(frozen=True, slots=True)
class ShardedLookup:
    """The answer of a lookup.

    Attributes:
        variants: One item for each key, in order.
        as_of: The deletes that each shard knew of, by the shard's address. A put that was planned
            on this lookup carries it.
    """

    variants: tuple[ChunkVariants, ...]
    as_of: Mapping[str, AsOf] = field(default_factory=dict)

    def by_key(self) -> dict[VariantKey, StoredVariant]:
        """Return every stored variant by its key."""
        return {stored.key: stored for variants in self.variants for stored in variants.stored}
