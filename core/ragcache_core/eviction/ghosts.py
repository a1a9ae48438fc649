"""A bounded memory of keys that a tier does not store (ghost entries)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MIN_GHOSTS = 65_536
"""Least number of ghosts, at about 200 bytes each.

In a small tier most keys return only after many others, so its memory must reach far beyond the
entries that it stores.
"""
GHOSTS_PER_ENTRY = 2


class GhostEntries(Generic[K, V]):
    """A bounded mapping: a put beyond its limit drops the oldest entry."""

    def __init__(self) -> None:
        self._values: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def put(self, key: K, value: V, num_stored: int) -> None:
        """Remember a value for a key.

        Args:
            num_stored: Number of entries that the tier stores, which sets the limit.
        """
        self._values[key] = value
        self._values.move_to_end(key)
        limit = max(MIN_GHOSTS, GHOSTS_PER_ENTRY * num_stored)
        while len(self._values) > limit:
            self._values.popitem(last=False)

    def get(self, key: K) -> V | None:
        """Return the value of key, or None, and keep it."""
        return self._values.get(key)

    def pop(self, key: K) -> V | None:
        """Return the value of key, or None, and forget it."""
        return self._values.pop(key, None)
