"""The nodes of the knowledge tree, and its leaves, coldest first."""

from __future__ import annotations

import itertools
from heapq import heapify, heappop, heappush

from ragcache_core.identity.keys import ChunkKey, VariantKey
from ragcache_core.knowledge.node_change import Residency


class TreeNode:
    """One chunk after one path of chunks. Only the tree changes it.

    Attributes:
        chunk: Key of the chunk.
        key: Key of the variant. None while no source has named it, because only its presence in
            an engine is predicted.
        parent: Node of the chunk before it. None for a node at the start of a prompt, and for one
            whose parent no source has reported.
        children: Nodes of the chunks after it, by chunk key. None instead of an empty dict.
        num_tokens: Length of the chunk. 0: no source has reported it.
        num_bytes: Size of the value in a cache store. 0: unknown.
        cost_s: Seconds that computing it took. 0: unknown.
        heat: Base 2 logarithm of the decayed number of uses, relative to time 0, in half-lives.
            Heats of different times compare without a decay.
        residency: How each source has it, by name of the source.
    """

    __slots__ = (
        "children",
        "chunk",
        "cost_s",
        "heat",
        "is_removed",
        "is_root",
        "key",
        "next_variant",
        "num_bytes",
        "num_tokens",
        "parent",
        "previous_variant",
        "queued",
        "residency",
    )

    def __init__(self, chunk: ChunkKey, heat: float) -> None:
        self.chunk = chunk
        self.key: VariantKey | None = None
        self.parent: TreeNode | None = None
        self.children: dict[ChunkKey, TreeNode] | None = None
        self.num_tokens = 0
        self.num_bytes = 0
        self.cost_s = 0.0
        self.heat = heat
        self.residency: dict[str, Residency] = {}
        self.is_root = False
        self.is_removed = False
        # Resident variants of one chunk form a list, so that no container per chunk is needed.
        self.next_variant: TreeNode | None = None
        self.previous_variant: TreeNode | None = None
        # Bits by heap of ``ColdestLeaves``: whether the node has an entry in it.
        self.queued = 0

    @property
    def is_exact(self) -> bool:
        """Whether any source has an exact copy."""
        # any() of a generator takes four times as long.
        for residency in self.residency.values():  # noqa: SIM110
            if residency.exact:
                return True
        return False

    def path(self) -> list[TreeNode]:
        """Return the nodes from the start of the prompt to this one."""
        nodes = []
        node: TreeNode | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


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
