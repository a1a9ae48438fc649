"""A large index of sequences by name that never stalls."""

from __future__ import annotations

from collections.abc import Hashable

PARTS = 1024
"""Number of dicts. A dict that grows copies all of its entries at once, so each must be small."""


class SequenceIndex:
    """The last sequence of each name, 0 for a name without one."""

    def __init__(self) -> None:
        self._parts: list[dict[Hashable, int]] = [{} for _ in range(PARTS)]

    def __contains__(self, name: Hashable) -> bool:
        return name in self._parts[hash(name) % PARTS]

    def get(self, name: Hashable) -> int:
        """Return the sequence of a name."""
        return self._parts[hash(name) % PARTS].get(name, 0)

    def set(self, name: Hashable, sequence: int) -> None:
        """Replace the sequence of a name."""
        self._parts[hash(name) % PARTS][name] = sequence

    def remove(self, name: Hashable, sequence: int) -> None:
        """Remove a name, unless it has a later sequence by now."""
        part = self._parts[hash(name) % PARTS]
        if part.get(name) == sequence:
            del part[name]
