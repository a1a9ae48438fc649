"""Deletes that are remembered: what they cover, and how long."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from ragcache_core.identity.keys import ChunkKey, VariantKey
from ragcache_core.identity.variant import Origin
from ragcache_core.store_api import Tombstone

AWAY_MS = 23 * 3600 * 1000
"""How long a folder may be away, or a peer silent, and still hear of every delete: somewhat less
than those are remembered, for clocks that differ and the time that it takes to tell."""

LIFETIME_MS = 24 * 3600 * 1000
"""How long a delete is remembered. A folder that was away for longer starts empty."""


class Tombstones:
    """Tombstones in the order of their sequence. Under the store's lock.

    last_sequence: that of the last delete, remembered or not.

    applied_ms: Unix time at which this store learnt of a delete. Another shard may have made it
    much earlier, so whoever asks what is new since some time is answered by this one.
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
        # Of each in _by_id, in the same order; both ascend.
        self._applied_ms: list[int] = []
        self._sequences: list[int] = []
        for tombstone in sorted(tombstones, key=lambda one: one.sequence):
            self.add(tombstone, applied_ms)

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, deletion_id: object) -> bool:
        return deletion_id in self._by_id

    def add(self, tombstone: Tombstone, applied_ms: int) -> None:
        """Remember a delete whose sequence is greater than every one before, and its id new."""
        deletion, sequence = tombstone.deletion, tombstone.sequence
        self._by_id[deletion.id] = tombstone
        # A clock that was set back must not hide a delete from who asks by time.
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
        """Whether a delete of a greater sequence than after removes this variant."""
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
        """Whether a delete names this variant or its chunk."""
        return key.chunk in self._chunks or key in self._variants

    def since(self, since_ms: int) -> list[Tombstone]:
        """Deletes applied here at since_ms or later, in the order in which that was."""
        first = bisect_left(self._applied_ms, since_ms)
        return list(islice(self._by_id.values(), first, None))

    def applied_by(self, at_ms: int) -> int:
        """Sequence of the last delete that is remembered and was applied by at_ms; 0: none."""
        end = bisect_right(self._applied_ms, at_ms)
        return self._sequences[end - 1] if end else 0

    def forget(self, before_ms: int) -> int:
        """Forget deletes made before before_ms; returns how many."""
        held = zip(self._by_id.values(), self._applied_ms, strict=True)
        kept = [item for item in held if item[0].deletion.made_at_ms >= before_ms]
        forgotten = len(self._by_id) - len(kept)
        if forgotten:
            again = Tombstones(last_sequence=self.last_sequence)
            for tombstone, applied_ms in kept:
                again.add(tombstone, applied_ms)
            self.__dict__.update(again.__dict__)
        return forgotten
