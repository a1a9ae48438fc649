"""Least-recently-used eviction under a byte budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class LeastRecentlyUsed(Generic[K]):
    """Decides which entries a tier of capacity_bytes keeps; holds no values itself.

    Exact to the byte: after every call the sizes of what is kept add up to at most the capacity.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError("capacity_bytes is at least 0")
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._sizes: OrderedDict[K, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: K) -> bool:
        return key in self._sizes

    def touch(self, key: K) -> None:
        """Note a use of key, if it is kept."""
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def admit(self, key: K, size_bytes: int) -> tuple[bool, list[K]]:
        """Offer an entry. Returns (whether it is kept, the keys that had to go for it).

        An entry larger than the whole tier is refused and evicts nothing.
        """
        self.remove(key)
        if size_bytes > self.capacity_bytes:
            return False, []
        evicted = []
        while self.used_bytes + size_bytes > self.capacity_bytes:
            victim, victim_bytes = self._sizes.popitem(last=False)
            self.used_bytes -= victim_bytes
            evicted.append(victim)
        self._sizes[key] = size_bytes
        self.used_bytes += size_bytes
        return True, evicted

    def remove(self, key: K) -> None:
        """Forget key, if it is kept."""
        size = self._sizes.pop(key, None)
        if size is not None:
            self.used_bytes -= size

    def check(self) -> None:
        """Raise AssertionError if the books do not balance."""
        assert self.used_bytes == sum(self._sizes.values())
        assert self.used_bytes <= self.capacity_bytes
