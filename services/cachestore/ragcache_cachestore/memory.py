"""The memory tier: values of the variants used last, all of them on disk as well."""

from __future__ import annotations

from ragcache_cachestore.pieces import Pieces
from ragcache_core.keys import VariantKey
from ragcache_core.lru import LeastRecentlyUsed


class MemoryTier:
    """Values in at most capacity_bytes, least recently used out first."""

    def __init__(self, capacity_bytes: int) -> None:
        self._recency: LeastRecentlyUsed[VariantKey] = LeastRecentlyUsed(capacity_bytes)
        self._values: dict[VariantKey, Pieces] = {}

    def __contains__(self, key: VariantKey) -> bool:
        return key in self._values

    @property
    def used_bytes(self) -> int:
        """Bytes of the values kept."""
        return self._recency.used_bytes

    @property
    def capacity_bytes(self) -> int:
        """Bound of used_bytes."""
        return self._recency.capacity_bytes

    def get(self, key: VariantKey) -> Pieces | None:
        """The value of key, noting the use."""
        self._recency.touch(key)
        return self._values.get(key)

    def put(self, key: VariantKey, pieces: Pieces) -> None:
        """Keep a value if it fits, dropping others for it."""
        self._values.pop(key, None)
        admitted, evicted = self._recency.admit(key, sum(map(len, pieces)))
        for victim in evicted:
            del self._values[victim]
        if admitted:
            self._values[key] = pieces

    def remove(self, key: VariantKey) -> None:
        """Drop the value of key, if it is kept."""
        self._recency.remove(key)
        self._values.pop(key, None)

    def check(self) -> None:
        """Raise AssertionError if the books do not balance."""
        self._recency.check()
        assert self.used_bytes == sum(len(p) for v in self._values.values() for p in v)
