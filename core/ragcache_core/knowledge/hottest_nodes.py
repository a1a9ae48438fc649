"""The hottest nodes of the knowledge tree, found in steps that are short."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from heapq import heappush, heapreplace

from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_core.knowledge.tree_node import TreeNode


class HottestNodes:
    """Visits every node that prompts can reach, and keeps the hottest ones.

    The tree may change between two steps. Nodes that were added or moved meanwhile may be missing.

    Args:
        max_nodes: Most nodes to keep.
    """

    def __init__(self, tree: KnowledgeTree, max_nodes: int) -> None:
        self._max_nodes = max_nodes
        self._serials = itertools.count()
        self._heap: list[tuple[float, int, TreeNode]] = []  # coldest first
        # Copies, because dicts must not change while they are iterated.
        self._siblings = [list(tree.roots.values())]
        self._num_left = len(tree)  # a tree that grows does not prolong the visit

    def visit(self, max_visits: int) -> bool:
        """Visit the next nodes.

        Returns:
            Whether there are more.
        """
        for _ in range(min(max_visits, self._num_left)):
            while self._siblings and not self._siblings[-1]:
                self._siblings.pop()
            if not self._siblings:
                self._num_left = 0
                break
            self._num_left -= 1
            node = self._siblings[-1].pop()
            self._keep_if_hot(node)
            if node.children:
                self._siblings.append(list(node.children.values()))
        return self._num_left > 0

    def nodes(self) -> list[TreeNode]:
        """Return the hottest of the visited nodes that are still in the tree, hottest first."""
        hottest = sorted(self._heap, key=lambda entry: (-entry[0], entry[1]))
        return [node for _, _, node in hottest if not node.is_removed]

    def _keep_if_hot(self, node: TreeNode) -> None:
        if len(self._heap) < self._max_nodes:
            heappush(self._heap, (node.heat, next(self._serials), node))
        elif node.heat > self._heap[0][0]:
            heapreplace(self._heap, (node.heat, next(self._serials), node))


def with_ancestors(hottest: Iterable[TreeNode], max_nodes: int) -> list[TreeNode]:
    """Return the hottest nodes with all nodes before them, in the order of the tree.

    A node whose ancestors do not fit any more is left out, and so are colder ones.

    Args:
        hottest: Hottest first.

    Returns:
        At most max_nodes nodes. A parent comes right before its first child, and the subtree of a
        hotter child before that of a colder one.
    """
    chosen: dict[TreeNode, None] = {}
    for node in hottest:
        added = [one for one in node.path() if one not in chosen]
        if len(chosen) + len(added) > max_nodes:
            break
        chosen.update(dict.fromkeys(added))
    children: dict[TreeNode | None, list[TreeNode]] = {}
    for node in chosen:
        children.setdefault(node.parent, []).append(node)
    ordered: list[TreeNode] = []
    pending = sorted(children.get(None, ()), key=_heat)
    while pending:
        node = pending.pop()
        ordered.append(node)
        pending.extend(sorted(children.get(node, ()), key=_heat))
    return ordered


def _heat(node: TreeNode) -> float:
    return node.heat
