"""Results of calls to several shards, and how they are merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ragcache_core.errors import InvalidInput, RagCacheError, Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.store_api import AsOf, ChunkVariants, StoredVariant
from ragcache_kv.store_client.client import SERVICE

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


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """The result of a delete.

    Attributes:
        removed: Number of removed variants.
        acknowledged: Addresses of the shards that acknowledged the delete.
        unacknowledged: The error of each other shard, by its address.
    """

    removed: int
    acknowledged: tuple[str, ...]
    unacknowledged: Mapping[str, str]


def merge_deletes(answers: Mapping[str, int | RagCacheError]) -> DeleteResult:
    """Merge the answers to a delete, by the shards' addresses.

    Raises:
        Unavailable: No shard acknowledged the delete.
        InvalidInput: The deletion is invalid.
    """
    if not answers:
        raise Unavailable(SERVICE, NO_SHARDS)
    errors = {name: error for name, error in answers.items() if isinstance(error, RagCacheError)}
    for error in errors.values():
        # Every shard refuses an invalid deletion.
        if isinstance(error, InvalidInput):
            raise error
    acknowledged = tuple(name for name in answers if name not in errors)
    if not acknowledged:
        raise next(iter(errors.values()))
    removed = sum(answer for answer in answers.values() if isinstance(answer, int))
    return DeleteResult(removed, acknowledged, {name: str(e) for name, e in errors.items()})
