"""The cache store as the ranks of a tensor parallel engine use it: one value for each rank.

Each rank has a range of the KV heads and stores them as a value of its own (``rank_key``). So ranks
send and read in parallel, and none of them moves bytes of another one. A variant is stored if the
parts of all ranks are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ragcache_core.identity.keys import VariantKey, rank_chunk, rank_key
from ragcache_core.identity.store_key import StoreKey
from ragcache_core.identity.variant import Miss, Precision, Provenance, Tier
from ragcache_core.store_api import (
    Ack,
    AsOf,
    ChunkVariants,
    LookupKey,
    NewVariant,
    PutOutcome,
    ReportedUses,
    StoredVariant,
)
from ragcache_kv.store_client.client import LOOKUP_TIMEOUT_S
from ragcache_kv.store_client.shard import KeyedValue
from ragcache_kv.store_client.shard_router import ShardedLookup
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_kv.values.outgoing_value import OutgoingValue
from ragcache_kv.values.stored_value import Allocate
from ragcache_wire.peers.credentials import NO_CREDENTIALS, Credentials
from ragcache_wire.watched.members import Members


class RankStore(ShardedStore):
    """A client whose callers name variants, and which reads and puts the parts of ranks.

    Args:
        members: The shards.
        ranks: Whose parts lookups, prefetches and reports of uses are about. Values are read and
            put for the first of them.
        credentials: As ``ShardedStore``.
        store_key: As ``ShardedStore``.
        encodings: As ``ShardedStore``.
    """

    def __init__(
        self,
        members: Members,
        ranks: Sequence[int],
        credentials: Credentials = NO_CREDENTIALS,
        store_key: StoreKey | None = None,
        encodings: Sequence[Precision] = (),
    ) -> None:
        super().__init__(members, credentials, store_key, encodings)
        self._ranks = ranks

    def lookup(
        self,
        keys: Sequence[LookupKey],
        timeout_s: float = LOOKUP_TIMEOUT_S,
        *,
        exact: bool = False,
        domain: str = "",
        lossy: bool = False,
    ) -> ShardedLookup:
        """Return what the shards store of keys, with the bytes of all ranks together."""
        wanted = [
            replace(key, chunk=rank_chunk(key.chunk, rank)) for rank in self._ranks for key in keys
        ]
        found = super().lookup(wanted, timeout_s, exact=exact, domain=domain, lossy=lossy)
        by_rank = [
            found.variants[start : start + len(keys)] for start in range(0, len(wanted), len(keys))
        ]
        merged = [merged_variants(key, parts) for key, *parts in zip(keys, *by_rank, strict=True)]
        return replace(found, variants=tuple(merged))

    def get(
        self,
        keys: Sequence[VariantKey],
        timeout_s: float,
        *,
        exact: bool = False,
        domain: str = "",
        allocate: Allocate | None = None,
        fix_overheads: Mapping[VariantKey, float] | None = None,
    ) -> Iterator[KeyedValue]:
        """Yield the first rank's values in the order of keys, as ``ShardedStore`` does."""
        rank = self._ranks[0]
        values = super().get(
            [rank_key(key, rank) for key in keys],
            timeout_s,
            exact=exact,
            domain=domain,
            allocate=allocate,
            fix_overheads={rank_key(key, rank): o for key, o in (fix_overheads or {}).items()},
        )
        # The store's answer comes first, so that its end is read, too.
        for (_, value), key in zip(values, keys, strict=True):
            yield key, value

    def put(
        self,
        variant: NewVariant,
        value: OutgoingValue,
        timeout_s: float,
        ack: Ack = Ack.ACCEPTED,
        *,
        as_of: Mapping[str, AsOf] | None = None,
    ) -> PutOutcome:
        """Store the first rank's part of a variant."""
        part = _part(variant, self._ranks[0])
        return super().put(part, value, timeout_s, ack, as_of=as_of)

    def report_uses(
        self, reports: Sequence[ReportedUses], timeout_s: float = LOOKUP_TIMEOUT_S
    ) -> int:
        """Report uses of the ranks' parts. Return how many the shards counted."""
        parts = [
            replace(one, key=rank_key(one.key, rank)) for rank in self._ranks for one in reports
        ]
        return super().report_uses(parts, timeout_s)

    def prefetch(
        self,
        keys: Sequence[VariantKey],
        timeout_s: float = LOOKUP_TIMEOUT_S,
        *,
        hold_s: float = 0.0,
    ) -> int:
        """Bring the ranks' parts from disk into memory, and hold them there."""
        parts = [rank_key(key, rank) for rank in self._ranks for key in keys]
        return super().prefetch(parts, timeout_s, hold_s=hold_s)


def _part(variant: NewVariant, rank: int) -> NewVariant:
    """Return a rank's part of a variant, which a delete of the variant's chunk deletes, too."""
    if not rank:
        return variant
    origin = variant.origin
    parent = None if origin.parent is None else rank_key(origin.parent, rank)
    chunks = (*origin.prefix_chunks, variant.key.chunk)
    return replace(
        variant,
        key=rank_key(variant.key, rank),
        origin=replace(origin, prefix_chunks=chunks, parent=parent),
    )


def merged_variants(key: LookupKey, parts: Sequence[ChunkVariants]) -> ChunkVariants:
    """Return the variants that are stored with the parts of all ranks."""
    first, *others = parts
    known = [{one.key.prefix: one for one in found.stored} for found in others]
    stored = [
        _joined(key, [one, *(found[one.key.prefix] for found in known)])
        for one in first.stored
        if all(_alike(one, found.get(one.key.prefix)) for found in known)
    ]
    if stored:
        return ChunkVariants(tuple(stored))
    misses = (found.miss for found in parts if found.miss is not None)
    return ChunkVariants(miss=next(misses, Miss.EVICTED))


def _alike(one: StoredVariant, other: StoredVariant | None) -> bool:
    """Tell whether two ranks' parts are of one computation, as far as a reader may tell.

    Exact parts follow from their key. Others may be of two requests with other readers.
    """
    if other is None:
        return False
    same = one.info.num_tokens, one.info.base_position
    if same != (other.info.num_tokens, other.info.base_position):
        return False
    both_exact = one.info.provenance.exact and other.info.provenance.exact
    return both_exact or one.influence == other.influence


def _joined(key: LookupKey, parts: Sequence[StoredVariant]) -> StoredVariant:
    """Return a variant whose parts are stored: as near and as exact as the worst of them."""
    first = parts[0]
    info = replace(
        first.info,
        num_bytes=sum(one.info.num_bytes for one in parts),
        provenance=Provenance(exact=all(one.info.provenance.exact for one in parts)),
        precision=next(
            (one.info.precision for one in parts if not one.info.precision.lossless),
            first.info.precision,
        ),
    )
    slowest = next((one for one in parts if one.tier is not Tier.MEMORY), first)
    return replace(
        first,
        key=VariantKey(key.chunk, first.key.prefix),
        info=info,
        tier=slowest.tier,
        load_s=max(one.load_s for one in parts),
        wants_higher_precision=any(one.wants_higher_precision for one in parts),
    )
