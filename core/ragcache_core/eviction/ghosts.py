"""What is remembered of keys that are not held: bounded, the longest unseen is forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MIN_GHOSTS = 65_536
"""Kept at least, at some 200 bytes each: a small tier sees most of its keys return only after many
others, so its memory must reach far beyond what it holds."""
GHOSTS_PER_ENTRY = 2


class GhostEntries(Generic[K, V]):
    """A bounded mapping: putting beyond its limit drops what was put first."""

    def __init__(self) -> None:
        self._values: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def put(self, key: K, value: V, num_held: int) -> None:
        """Remember value; num_held: entries that the tier holds, which sets the limit."""
        self._values[key] = value
        self._values.move_to_end(key)
        limit = max(MIN_GHOSTS, GHOSTS_PER_ENTRY * num_held)
        while len(self._values) > limit:
            self._values.popitem(last=False)

    def get(self, key: K) -> V | None:
        """What is remembered of key, which stays remembered."""
        return self._values.get(key)

    def pop(self, key: K) -> V | None:
        """What is remembered of key, and forget it."""
        return self._values.pop(key, None)
