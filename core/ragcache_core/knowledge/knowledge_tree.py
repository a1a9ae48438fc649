"""The knowledge tree: a prefix tree of chunks, and which source has the KV of each node.

A path from the root is the beginning of a prompt: the segments of the template's head, then chunks.
Within one KV space and access domain a chunk has one variant after each path, so a node is found by
its parent and its chunk key, and no token is hashed.

Engines and stores report variants one by one and in any order. A variant whose parent is not known
yet stays without one until the parent is reported.

Source: RAGCache section 5.1; RAGCache++ section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ragcache_core.identity.keys import ChunkKey, VariantKey
from ragcache_core.knowledge.node_change import Residency, StoredNode, residency_in
from ragcache_core.knowledge.tree_node import ColdestLeaves, TreeNode

HALF_LIFE_S = 3600.0
"""After this time a use counts half."""

NEW_NODE_HEAT = -4.0
"""Heat of a new node at the time of its report: as if a sixteenth of a use."""

MIN_NODES = 2
"""A node and its parent."""


class KnowledgeTree:
    """Nodes by path and by key, with their residency. Not safe for several threads.

    A source is ``engine:ADDRESS`` or ``store:ADDRESS``. Events that refer to a variant which the
    tree does not have are ignored, because the tree may have removed it.

    Args:
        max_nodes: Most nodes. At an insertion above it the coldest leaf that no source has leaves
            the tree, or else the coldest leaf.
    """

    def __init__(self, max_nodes: int) -> None:
        if max_nodes < MIN_NODES:
            raise ValueError(f"max_nodes is {max_nodes}, less than {MIN_NODES}")
        self._max_nodes = max_nodes
        self._num_nodes = 0
        self._now_half_lives = 0.0
        self._roots: dict[ChunkKey, TreeNode] = {}
        self._by_key: dict[VariantKey, TreeNode] = {}
        self._by_chunk: dict[ChunkKey, TreeNode] = {}  # the first resident variant of each
        self._by_source: dict[str, set[TreeNode]] = {}
        self._unconfirmed: dict[str, set[TreeNode]] = {}  # during a snapshot of a source
        self._leaves = ColdestLeaves()

    def __len__(self) -> int:
        return self._num_nodes

    @property
    def roots(self) -> dict[ChunkKey, TreeNode]:
        """Nodes at the start of a prompt, by chunk key. Read only."""
        return self._roots

    @property
    def sources(self) -> list[str]:
        """Names of the sources that have a variant."""
        return list(self._by_source)

    def store(self, source: str, tier: str, node: StoredNode) -> None:
        """Record that a source has a variant, or that its copy has changed.

        A variant that names itself as its parent is ignored.
        """
        if node.parent == node.key:
            return
        known = self._by_key.get(node.key)
        if known is None:
            known = self._new_keyed(node)
        elif known.parent is None and not known.is_root:
            known = self._connect(known, node)
        known.num_tokens = node.num_tokens
        known.num_bytes = node.num_bytes or known.num_bytes
        known.cost_s = node.cost_s or known.cost_s
        self._add_residency(known, source, residency_in(tier, node.exact))
        self._enforce_cap(known)

    def drop(self, source: str, key: VariantKey) -> None:
        """Record that a source has no copy any more."""
        node = self._by_key.get(key)
        if node is not None:
            self._drop_residency(node, source)

    def begin_snapshot(self, source: str) -> None:
        """Begin a list of all variants of a source.

        Variants that are not stored again until ``end_snapshot`` are dropped then.
        """
        self._unconfirmed[source] = set(self._by_source.get(source, ()))

    def end_snapshot(self, source: str) -> None:
        """End a list of all variants of a source. Without a begin it does nothing."""
        for node in self._unconfirmed.pop(source, ()):
            self._drop_residency(node, source)

    def forget(self, source: str) -> None:
        """Drop all variants of a source."""
        self._unconfirmed.pop(source, None)
        for node in self._by_source.get(source, set()).copy():
            self._drop_residency(node, source)

    def assume(
        self, source: str, tier: str, chunks: Sequence[ChunkKey], num_tokens: Sequence[int]
    ) -> list[TreeNode]:
        """Record that a source must have a path of chunks, although it reports nothing.

        Args:
            num_tokens: Length of each chunk.

        Returns:
            The nodes of the path; fewer than chunks if the tree is too small for it.
        """
        nodes: list[TreeNode] = []
        parent: TreeNode | None = None
        residency = residency_in(tier, True)
        for chunk, tokens in zip(chunks, num_tokens, strict=True):
            node = self._child(parent, chunk)
            if node is None:
                node = self._new_node(chunk)
                self._attach(node, parent)
            node.num_tokens = node.num_tokens or tokens
            self._add_residency(node, source, residency)
            self._enforce_cap(node)
            if node.is_removed:
                break
            nodes.append(node)
            parent = node
        return nodes

    def retract(self, source: str, node: TreeNode) -> None:
        """Take back what ``assume`` recorded of one node."""
        self._drop_residency(node, source)

    def walk(self, chunks: Sequence[ChunkKey]) -> Iterator[TreeNode]:
        """Yield the known nodes of a prompt's first chunks, whether or not a source has them."""
        children: dict[ChunkKey, TreeNode] | None = self._roots
        for chunk in chunks:
            node = children.get(chunk) if children else None
            if node is None:
                return
            yield node
            children = node.children

    def children_after(self, chunks: Sequence[ChunkKey]) -> dict[ChunkKey, TreeNode] | None:
        """Return the nodes after a path that is stored exactly. None: there is none. Read only."""
        children: dict[ChunkKey, TreeNode] | None = self._roots
        for chunk in chunks:
            node = children.get(chunk) if children else None
            if node is None or not node.is_exact:
                return None
            children = node.children
        return children

    def variants_of(self, chunk: ChunkKey, limit: int = 8) -> list[TreeNode]:
        """Return stored variants of a chunk after any path, newest first.

        Args:
            limit: Most variants to return.
        """
        nodes: list[TreeNode] = []
        node = self._by_chunk.get(chunk)
        while node is not None and len(nodes) < limit:
            nodes.append(node)
            node = node.next_variant
        return nodes

    def record_use(self, chunks: Sequence[ChunkKey], now_s: float) -> None:
        """Count a use of each known node of a prompt.

        Args:
            now_s: Seconds of a clock that never goes back.
        """
        now = self._now_half_lives = max(self._now_half_lives, now_s / HALF_LIFE_S)
        for node in self.walk(chunks):
            node.heat = now + math.log2(2.0 ** (node.heat - now) + 1.0)

    def frequency(self, node: TreeNode, now_s: float) -> float:
        """Return the decayed number of uses of a node."""
        return float(2.0 ** (node.heat - now_s / HALF_LIFE_S))

    def check(self) -> None:
        """Assert the invariants. Visits every node."""
        nodes = set(self._by_key.values())
        for top in (*self._roots.values(), *self._by_key.values()):
            if top.parent is None:
                nodes.update(_subtree(top))
        assert len(nodes) == self._num_nodes <= self._max_nodes
        for node in nodes:
            self._check_node(node)
        for source, members in self._by_source.items():
            assert members == {node for node in nodes if source in node.residency}
        for source, members in self._unconfirmed.items():
            assert members <= self._by_source.get(source, set())
        listed = [node for chunk in self._by_chunk for node in self.variants_of(chunk, len(nodes))]
        assert len(listed) == len(set(listed))
        assert set(listed) == {node for node in nodes if node.residency}

    def _check_node(self, node: TreeNode) -> None:
        assert not node.is_removed
        assert node.key is None or (node.key.chunk == node.chunk and self._by_key[node.key] is node)
        assert node.children is None or node.children
        for chunk, child in (node.children or {}).items():
            assert child.chunk == chunk
            assert child.parent is node
            assert not child.is_root
        if node.is_root:
            assert node.parent is None
            assert self._roots[node.chunk] is node
        elif node.parent is not None:
            assert node.parent.children is not None
            assert node.parent.children[node.chunk] is node
        else:
            assert node.key is not None, "a node without key and parent cannot be found"

    def _child(self, parent: TreeNode | None, chunk: ChunkKey) -> TreeNode | None:
        children = self._roots if parent is None else parent.children
        return children.get(chunk) if children else None

    def _new_node(self, chunk: ChunkKey) -> TreeNode:
        self._num_nodes += 1
        return TreeNode(chunk, self._now_half_lives + NEW_NODE_HEAT)

    def _name(self, node: TreeNode, key: VariantKey) -> TreeNode:
        node.key = key
        self._by_key[key] = node
        return node

    def _parent_of(self, stored: StoredNode) -> TreeNode | None:
        """Return the parent's node. One that is not known yet gets a node without residency."""
        if stored.parent is None:
            return None
        parent = self._by_key.get(stored.parent)
        if parent is None:
            parent = self._name(self._new_node(stored.parent.chunk), stored.parent)
        return parent

    def _new_keyed(self, stored: StoredNode) -> TreeNode:
        parent = self._parent_of(stored)
        known = self._child(parent, stored.key.chunk)
        if known is not None and known.key is None:
            return self._name(known, stored.key)
        node = self._name(self._new_node(stored.key.chunk), stored.key)
        if known is None:
            self._attach(node, parent)
        return node

    def _connect(self, node: TreeNode, stored: StoredNode) -> TreeNode:
        """Attach a node whose parent was not known, unless another one has its position."""
        if stored.parent is not None and self._is_above(node, stored.parent):
            return node
        parent = self._parent_of(stored)
        known = self._child(parent, node.chunk)
        if known is None:
            self._attach(node, parent)
        elif known.key is None:
            node = self._merge(node, known)
        return node

    def _is_above(self, node: TreeNode, key: VariantKey) -> bool:
        """Tell whether a node is, or comes before, the node of a key."""
        other = self._by_key.get(key)
        while other is not None and other is not node:
            other = other.parent
        return other is node

    def _attach(self, node: TreeNode, parent: TreeNode | None) -> None:
        if parent is None:
            node.is_root = True
            self._roots[node.chunk] = node
        else:
            if parent.children is None:
                parent.children = {}
            parent.children[node.chunk] = node
            node.parent = parent

    def _detach(self, node: TreeNode) -> None:
        parent = node.parent
        if parent is not None:
            assert parent.children is not None
            del parent.children[node.chunk]
            if not parent.children:
                parent.children = None
                self._leaves.add(parent)
            node.parent = None
        elif node.is_root:
            node.is_root = False
            del self._roots[node.chunk]

    def _merge(self, keyed: TreeNode, predicted: TreeNode) -> TreeNode:
        """Move all that is known of a node without parent to the predicted node of its path.

        The predicted nodes stay, because ``PredictedCache`` refers to them.
        """
        pairs = [(keyed, predicted)]
        while pairs:
            old, new = pairs.pop()
            new.heat = max(new.heat, old.heat)
            new.num_tokens = old.num_tokens or new.num_tokens
            new.num_bytes, new.cost_s = old.num_bytes, old.cost_s
            for source, residency in list(old.residency.items()):
                self._drop_residency(old, source)
                self._add_residency(new, source, residency)
            for child in list((old.children or {}).values()):
                self._detach(child)
                known = self._child(new, child.chunk)
                if known is None:
                    self._attach(child, new)
                else:
                    pairs.append((child, known))
            key = old.key
            self._forget_node(old)
            if key is not None:
                self._name(new, key)
        return predicted

    def _add_residency(self, node: TreeNode, source: str, residency: Residency) -> None:
        is_first = not node.residency
        node.residency[source] = residency
        self._by_source.setdefault(source, set()).add(node)
        if source in self._unconfirmed:
            self._unconfirmed[source].discard(node)
        if is_first:
            self._list_variant(node)
        if is_first or node.children is None:
            self._leaves.add(node)

    def _drop_residency(self, node: TreeNode, source: str) -> None:
        if node.residency.pop(source, None) is None:
            return
        members = self._by_source[source]
        members.discard(node)
        if not members:
            del self._by_source[source]
        if source in self._unconfirmed:
            self._unconfirmed[source].discard(node)
        if not node.residency:
            self._unlist_variant(node)
            self._leaves.add(node)

    def _list_variant(self, node: TreeNode) -> None:
        first = self._by_chunk.get(node.chunk)
        node.next_variant = first
        if first is not None:
            first.previous_variant = node
        self._by_chunk[node.chunk] = node

    def _unlist_variant(self, node: TreeNode) -> None:
        before, after = node.previous_variant, node.next_variant
        if after is not None:
            after.previous_variant = before
        if before is not None:
            before.next_variant = after
        elif after is not None:
            self._by_chunk[node.chunk] = after
        else:
            del self._by_chunk[node.chunk]
        node.previous_variant = node.next_variant = None

    def _enforce_cap(self, inserted: TreeNode) -> None:
        while self._num_nodes > self._max_nodes:
            self._remove(self._leaves.pop(inserted) or inserted)
        self._leaves.trim(self._num_nodes)

    def _remove(self, node: TreeNode) -> None:
        """Remove a leaf."""
        for source in list(node.residency):
            self._drop_residency(node, source)
        self._detach(node)
        self._forget_node(node)

    def _forget_node(self, node: TreeNode) -> None:
        if node.key is not None:
            del self._by_key[node.key]
        node.is_removed = True
        self._num_nodes -= 1


def _subtree(top: TreeNode) -> Iterator[TreeNode]:
    nodes = [top]
    while nodes:
        node = nodes.pop()
        yield node
        nodes.extend((node.children or {}).values())
