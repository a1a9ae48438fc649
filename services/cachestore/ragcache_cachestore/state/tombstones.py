"""The deletes that a store remembers, and what they cover."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from ragcache_core.identity.keys import ChunkKey, VariantKey
from ragcache_core.identity.variant import Origin
from ragcache_core.store_api import Tombstone

AWAY_MS = 23 * 3600 * 1000
"""How long a folder may be away, or a peer silent, and still hear of every delete.

It is less than LIFETIME_MS, because clocks differ and a pull takes time.
"""

LIFETIME_MS = 24 * 3600 * 1000
"""How long a delete is remembered. A folder that was away longer starts empty."""


class Tombstones:
    """Tombstones in the order of their sequence. The store's lock guards them.

    Another shard may have made a delete long before this store applies it. A shard that asks for
    the deletes since a time is answered by the time at which this store applied them.

    Args:
        applied_ms: Unix time noted for the tombstones found at start.

    Attributes:
        last_sequence: Sequence of the last delete, even if it is forgotten.
    """

    def __init__(
        self,
        tombstones: Iterable[Tombstone] = (),
        last_sequence: int = 0,
        *,
        applied_ms: int = 0,
    ) -> None:
        self.last_sequence = last_sequence
        self._by_id: OrderedDict[bytes, Tombstone] = OrderedDict()
        self._chunks: dict[ChunkKey, int] = {}
        self._variants: dict[VariantKey, int] = {}
        self._documents: dict[tuple[str, str], int] = {}
        self._domains: dict[str, int] = {}
        # One item for each tombstone of _by_id, in the same order. Both lists ascend.
        self._applied_ms: list[int] = []
        self._sequences: list[int] = []
        for tombstone in sorted(tombstones, key=lambda one: one.sequence):
            self.add(tombstone, applied_ms)

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, deletion_id: object) -> bool:
        return deletion_id in self._by_id

    def add(self, tombstone: Tombstone, applied_ms: int) -> None:
        """Add a delete with a new id and a sequence greater than all before."""
        deletion, sequence = tombstone.deletion, tombstone.sequence
        self._by_id[deletion.id] = tombstone
        # A clock that was set back must not hide a delete from a caller that asks by time.
        self._applied_ms.append(max([applied_ms, *self._applied_ms[-1:]]))
        self._sequences.append(sequence)
        self.last_sequence = max(self.last_sequence, sequence)
        for chunk in deletion.chunks:
            self._chunks[chunk] = sequence
        for key in deletion.variants:
            self._variants[key] = sequence
        for document in deletion.documents:
            self._documents[deletion.domain, document] = sequence
        if deletion.domain and not deletion.documents:
            self._domains[deletion.domain] = sequence

    def covers(self, key: VariantKey, origin: Origin, after: int) -> bool:
        """Return whether a delete with a sequence greater than after covers this variant."""
        if not self._by_id:
            return False
        document = (origin.domain, origin.document)
        return (
            self._chunks.get(key.chunk, 0) > after
            or self._variants.get(key, 0) > after
            or (bool(origin.document) and self._documents.get(document, 0) > after)
            or self._domains.get(origin.domain, 0) > after
            or any(self._chunks.get(chunk, 0) > after for chunk in origin.prefix_chunks)
        )

    def names(self, key: VariantKey) -> bool:
        """Return whether a delete names this variant or its chunk."""
        return key.chunk in self._chunks or key in self._variants

    def since(self, since_ms: int) -> list[Tombstone]:
        """Return the deletes applied here at since_ms or later, in that order."""
        first = bisect_left(self._applied_ms, since_ms)
        return list(islice(self._by_id.values(), first, None))

    def applied_by(self, at_ms: int) -> int:
        """Return the sequence of the last remembered delete that was applied by at_ms, or 0."""
        end = bisect_right(self._applied_ms, at_ms)
        return self._sequences[end - 1] if end else 0

    def forget(self, before_ms: int) -> int:
        """Remove the deletes made before before_ms. Return how many there were."""
        dated = zip(self._by_id.values(), self._applied_ms, strict=True)
        kept = [item for item in dated if item[0].deletion.made_at_ms >= before_ms]
        num_forgotten = len(self._by_id) - len(kept)
        if num_forgotten:
            rebuilt = Tombstones(last_sequence=self.last_sequence)
            for tombstone, applied_ms in kept:
                rebuilt.add(tombstone, applied_ms)
            self.__dict__.update(rebuilt.__dict__)
        return num_forgotten
