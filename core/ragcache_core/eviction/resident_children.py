"""Counts resident children, which tells the leaves of a tier from its inner nodes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class ResidentChildren(Generic[K]):
    """Counts the resident children of every parent. The parent need not be resident."""

    def __init__(self) -> None:
        self._num_children: dict[K, int] = {}

    def is_leaf(self, key: K) -> bool:
        """Whether no child of key is resident."""
        return key not in self._num_children

    def add(self, parent: K | None) -> None:
        """Record that a child of parent has become resident."""
        if parent is not None:
            self._num_children[parent] = self._num_children.get(parent, 0) + 1

    def remove(self, parent: K | None) -> bool:
        """Record that a child of parent is no longer resident.

        Returns:
            Whether parent has become a leaf by this.
        """
        if parent is None:
            return False
        left = self._num_children[parent] - 1
        if left:
            self._num_children[parent] = left
            return False
        del self._num_children[parent]
        return True

    def check(self, parents: Iterable[K | None]) -> None:
        """Raise AssertionError unless parents are those of all resident entries."""
        counted: dict[K, int] = {}
        for parent in parents:
            if parent is not None:
                counted[parent] = counted.get(parent, 0) + 1
        assert counted == self._num_children
