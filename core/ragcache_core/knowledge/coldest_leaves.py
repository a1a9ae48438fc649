"""The leaves of the knowledge tree, coldest first."""

from __future__ import annotations

import itertools
from heapq import heapify, heappop, heappush

from ragcache_core.knowledge.tree_node import TreeNode

_EMPTY, _RESIDENT = 0, 1
_MIN_REBUILD = 64


class ColdestLeaves:
    """Two heaps with lazy updates: leaves that no source has, and other leaves.

    An entry has the heat that its node had when it was pushed. Heats only rise, so the node of a
    stale entry is pushed again when the entry comes up.
    """

    def __init__(self) -> None:
        self._heaps: tuple[list[tuple[float, int, TreeNode]], ...] = ([], [])
        self._serials = itertools.count()

    def add(self, node: TreeNode) -> None:
        """Add a node that became a leaf, or a leaf that gained or lost its last residency."""
        if node.children is None and not node.is_removed:
            self._push(_RESIDENT if node.residency else _EMPTY, node)

    def pop(self, protected: TreeNode) -> TreeNode | None:
        """Remove and return the coldest leaf, one that no source has if there is one.

        Args:
            protected: Not returned.
        """
        for kind in (_EMPTY, _RESIDENT):
            node = self._pop(kind, protected)
            if node is not None:
                return node
        return None

    def trim(self, num_nodes: int) -> None:
        """Drop entries of removed nodes when they outnumber the tree's nodes."""
        if len(self) <= 3 * num_nodes + _MIN_REBUILD:
            return
        for kind, heap in enumerate(self._heaps):
            for _, _, node in heap:
                if not _belongs(node, kind):
                    node.queued &= ~(1 << kind)
            heap[:] = [entry for entry in heap if entry[2].queued & 1 << kind]
            heapify(heap)

    def __len__(self) -> int:
        return sum(map(len, self._heaps))

    def _push(self, kind: int, node: TreeNode) -> None:
        if not node.queued & 1 << kind:
            node.queued |= 1 << kind
            heappush(self._heaps[kind], (node.heat, next(self._serials), node))

    def _pop(self, kind: int, protected: TreeNode) -> TreeNode | None:
        heap = self._heaps[kind]
        found = None
        has_protected = False
        while heap and found is None:
            heat, _, node = heappop(heap)
            node.queued &= ~(1 << kind)
            if not _belongs(node, kind):
                continue
            if node is protected:
                has_protected = True
            elif node.heat > heat:
                self._push(kind, node)
            else:
                found = node
        if has_protected:
            self._push(kind, protected)
        return found


def _belongs(node: TreeNode, kind: int) -> bool:
    is_leaf = node.children is None and not node.is_removed
    return is_leaf and bool(node.residency) == (kind == _RESIDENT)
