"""Deletes that are remembered: what they cover, and how long."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ragcache_core.keys import ChunkKey, VariantKey
from ragcache_core.storing import Tombstone
from ragcache_core.variant import Origin

LIFETIME_MS = 24 * 3600 * 1000
"""How long a delete is remembered. A folder that was away for longer starts empty."""


class Tombstones:
    """Tombstones in the order of their sequence. Under the store's lock.

    last_sequence: that of the last delete, remembered or not.
    """

    def __init__(self, tombstones: Iterable[Tombstone] = (), last_sequence: int = 0) -> None:
        self.last_sequence = last_sequence
        self._by_id: OrderedDict[bytes, Tombstone] = OrderedDict()
        self._chunks: dict[ChunkKey, int] = {}
        self._variants: dict[VariantKey, int] = {}
        self._documents: dict[tuple[str, str], int] = {}
        self._domains: dict[str, int] = {}
        for tombstone in sorted(tombstones, key=lambda one: one.sequence):
            self.add(tombstone)

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, deletion_id: object) -> bool:
        return deletion_id in self._by_id

    def add(self, tombstone: Tombstone) -> None:
        """Remember a delete whose sequence is greater than every one before."""
        deletion, sequence = tombstone.deletion, tombstone.sequence
        self._by_id[deletion.id] = tombstone
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
        """Deletes made at since_ms or later, in the order in which they were applied here."""
        return [one for one in self._by_id.values() if one.deletion.made_at_ms >= since_ms]

    def forget(self, before_ms: int) -> int:
        """Forget deletes made before before_ms; returns how many."""
        kept = [one for one in self._by_id.values() if one.deletion.made_at_ms >= before_ms]
        forgotten = len(self._by_id) - len(kept)
        if forgotten:
            again = Tombstones(kept, self.last_sequence)
            self._by_id, self._chunks, self._variants = again._by_id, again._chunks, again._variants
            self._documents, self._domains = again._documents, again._domains
        return forgotten
