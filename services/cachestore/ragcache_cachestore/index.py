"""What is on disk, in memory: every variant's entry, and which of them have to go."""

from __future__ import annotations

from collections import defaultdict

from ragcache_cachestore.entry import Entry
from ragcache_core.keys import ChunkKey, VariantKey
from ragcache_core.lru import LeastRecentlyUsed


class Index:
    """Entries of the variants on disk, at most disk_bytes of values, least recently used out first.

    Recency lives here only: after a restart it is the order of puts.
    """

    def __init__(self, disk_bytes: int) -> None:
        self._entries: dict[VariantKey, Entry] = {}
        self._variants: defaultdict[ChunkKey, set[VariantKey]] = defaultdict(set)
        self._recency: LeastRecentlyUsed[VariantKey] = LeastRecentlyUsed(disk_bytes)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: VariantKey) -> bool:
        return key in self._entries

    @property
    def used_bytes(self) -> int:
        """Bytes of the values of all entries."""
        return self._recency.used_bytes

    @property
    def capacity_bytes(self) -> int:
        """Bound of used_bytes."""
        return self._recency.capacity_bytes

    def get(self, key: VariantKey) -> Entry | None:
        """The entry of key, without noting a use."""
        return self._entries.get(key)

    def touch(self, key: VariantKey) -> None:
        """Note a use of key."""
        self._recency.touch(key)

    def variants_of(self, chunk: ChunkKey) -> list[VariantKey]:
        """Every variant of chunk."""
        return list(self._variants.get(chunk, ()))

    def add(self, key: VariantKey, entry: Entry) -> list[tuple[VariantKey, Entry]]:
        """Add or replace the entry of key. Returns what has to go, which may be the newcomer."""
        self.remove(key)
        admitted, evicted = self._recency.admit(key, entry.info.num_bytes)
        gone = [(victim, self._entries[victim]) for victim in evicted]
        for victim, _ in gone:
            self._forget(victim)
        if not admitted:
            return [(key, entry)]
        self._entries[key] = entry
        self._variants[key.chunk].add(key)
        return gone

    def remove(self, key: VariantKey) -> Entry | None:
        """Remove key; its entry, if there was one."""
        entry = self._entries.get(key)
        if entry is not None:
            self._recency.remove(key)
            self._forget(key)
        return entry

    def check(self) -> None:
        """Raise AssertionError if the books do not balance."""
        self._recency.check()
        assert self._entries.keys() == {key for keys in self._variants.values() for key in keys}
        assert self.used_bytes == sum(e.info.num_bytes for e in self._entries.values())

    def _forget(self, key: VariantKey) -> None:
        del self._entries[key]
        variants = self._variants[key.chunk]
        variants.remove(key)
        if not variants:
            del self._variants[key.chunk]
