"""Routes keys to the shards that may store them, and keeps the shards' channels open."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ragcache_core.cluster.sharding import RendezvousHash
from ragcache_core.errors import RagCacheError
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.store_key import StoreKey
from ragcache_core.identity.variant import Precision
from ragcache_core.store_api import AsOf, ChunkVariants, StoredVariant
from ragcache_kv.store_client.shard import Shard
from ragcache_wire.peers.credentials import NO_CREDENTIALS, Credentials
from ragcache_wire.watched.members import Members

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


MAX_KNOWN = 1 << 16
"""Variants whose size and copies are remembered from lookups."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShardCandidates:
    """The shards that may store a chunk: its owner, then those that may have a copy."""

    owner: Shard
    others: tuple[Shard, ...]

    def all(self) -> tuple[Shard, ...]:
        """Return the owner and the others."""
        return (self.owner, *self.others)

    def first_available(self) -> Shard | None:
        """Return the first shard that is not lost."""
        return next((shard for shard in self.all() if shard.is_available), None)


@dataclass(frozen=True, slots=True)
class _VariantHint:
    """What the last lookup found of a variant."""

    num_bytes: int
    copies: tuple[str, ...]


class ShardRouter:
    """Follows the members, and knows which shards may store a key. Safe for threads.

    A removed member's channel is closed after its last call.
    """

    def __init__(
        self,
        members: Members,
        credentials: Credentials = NO_CREDENTIALS,
        store_key: StoreKey | None = None,
        encodings: Sequence[Precision] = (),
    ) -> None:
        self._members = members
        self._credentials = credentials
        self._store_key = store_key
        self._encodings = tuple(encodings)
        self._lock = threading.Lock()
        self._addresses: tuple[str, ...] = ()
        self._rendezvous = RendezvousHash(())
        self._shards: dict[str, Shard] = {}
        self._hints: OrderedDict[VariantKey, _VariantHint] = OrderedDict()

    def close(self) -> None:
        """Close every channel. Running calls end."""
        for shard in self._shards.values():
            shard.close()

    def transports(self) -> dict[str, str]:
        """Return the transport to each shard that is connected, by the shard's address."""
        with self._lock:
            shards = list(self._shards.values())
        return {shard.address: name for shard in shards if (name := shard.client.transport)}

    @contextlib.contextmanager
    def all_shards(self) -> Iterator[list[Shard]]:
        """Yield every shard, with its channel kept open."""
        with self._lock:
            self._refresh()
            shards = list(self._shards.values())
            used = self._use(shards)
        try:
            yield shards
        finally:
            self._release(used)

    @contextlib.contextmanager
    def candidates(
        self, chunks: Sequence[bytes], keys: Sequence[VariantKey] = ()
    ) -> Iterator[list[ShardCandidates]]:
        """Yield the candidates of each chunk, with their channels kept open.

        Args:
            chunks: Keys of the chunks.
            keys: One variant for each chunk, or none. With them, the copies that lookups found
                are among the candidates.

        Yields:
            One item for each chunk; an empty list if there are no shards.
        """
        with self._lock:
            self._refresh()
            if len(self._shards) == 1:
                [only] = self._shards.values()
                candidates = [ShardCandidates(only, ())] * len(chunks)
            elif self._shards:
                ranked = self._rendezvous.ranked(chunks, 2) if chunks else []
                candidates = [
                    self._candidates(names, self._hints.get(keys[i]) if keys else None)
                    for i, names in enumerate(ranked)
                ]
            else:
                candidates = []
            used = self._use(shard for one in candidates for shard in one.all())
        try:
            yield candidates
        finally:
            self._release(used)

    @contextlib.contextmanager
    def least_loaded(
        self, keys: Sequence[VariantKey], candidates: Sequence[ShardCandidates]
    ) -> Iterator[list[Shard | None]]:
        """Yield for each key the shard with the fewest outstanding bytes; None if all are lost.

        The sizes of the values count as outstanding until the context ends.
        """
        chosen: list[Shard | None] = []
        sizes = []
        with self._lock:
            for key, one in zip(keys, candidates, strict=True):
                hint = self._hints.get(key)
                size = hint.num_bytes if hint else 0
                # Without a known copy the other shards are a guess, for a lost owner only.
                sure = one.all() if hint and hint.copies else (one.owner,)
                available = [shard for shard in sure if shard.is_available] or [
                    shard for shard in one.others if shard.is_available
                ]
                shard = min(available, key=lambda shard: shard.outstanding_bytes, default=None)
                if shard is not None:
                    shard.outstanding_bytes += size
                chosen.append(shard)
                sizes.append(size)
        try:
            yield chosen
        finally:
            with self._lock:
                for size, shard in zip(sizes, chosen, strict=True):
                    if shard is not None:
                        shard.outstanding_bytes -= size

    def remember(self, lookup: ShardedLookup) -> None:
        """Keep the sizes and the copies of the variants that a lookup found."""
        with self._lock:
            for key, stored in lookup.by_key().items():
                self._hints[key] = _VariantHint(stored.info.num_bytes, stored.copies)
                self._hints.move_to_end(key)
            while len(self._hints) > MAX_KNOWN:
                self._hints.popitem(last=False)

    def note_failure(self, shard: Shard, error: RagCacheError, timeout_s: float) -> None:
        """Record a failed call. An only shard is never lost, since there is no other."""
        if len(self._shards) > 1:
            shard.note_failure(error, timeout_s)

    def _candidates(self, names: Sequence[str], hint: _VariantHint | None) -> ShardCandidates:
        owner, *others = names
        others = list(hint.copies) if hint and hint.copies else others
        present = [self._shards[name] for name in others if name in self._shards and name != owner]
        return ShardCandidates(self._shards[owner], tuple(present))

    @staticmethod
    def _use(shards: Iterable[Shard]) -> set[Shard]:
        """Count a user of each shard. Called under the lock."""
        used = set(shards)
        for shard in used:
            shard.num_users += 1
        return used

    def _release(self, used: set[Shard]) -> None:
        with self._lock:
            for shard in used:
                shard.num_users -= 1
            unused = [shard for shard in used if shard.is_removed and not shard.num_users]
        for shard in unused:
            shard.close()

    def _refresh(self) -> None:
        """Follow the members. Called under the lock."""
        addresses = self._members.current()
        if addresses is self._addresses:
            return
        self._addresses = addresses
        self._rendezvous = RendezvousHash(addresses)
        before = self._shards
        self._shards = {
            name: before.get(name)
            or Shard(name, self._credentials, self._store_key, self._encodings)
            for name in addresses
        }
        # The owners have changed, and copies with them.
        self._hints.clear()
        for name in before.keys() - self._shards.keys():
            before[name].is_removed = True
            if not before[name].num_users:
                before[name].close()


def group_by_shard(items: Sequence[T], shards: Sequence[Shard | None]) -> dict[Shard, list[T]]:
    """Return the items of each shard, in order. Items without a shard are left out."""
    groups: dict[Shard, list[T]] = {}
    for item, shard in zip(items, shards, strict=False):
        if shard is not None:
            groups.setdefault(shard, []).append(item)
    return groups
