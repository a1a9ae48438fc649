"""Translates which blocks an engine has cached to which nodes of the knowledge tree it has.

A node is a segment of a prompt after all segments before it. It ends inside a block or at the end
of one. An engine finds whole blocks only, so a node is resident while every full block from the
start of the prompt up to the node's end is cached. The tokens of a last, partial block do not
count: they share the block with the segment that follows.

A node that adds no full block to those before it has nothing of its own that could be cached. It is
resident while a node below it is, so that paths have no gap.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from ragcache_core.identity.keys import VariantKey
from ragcache_core.knowledge.node_change import NodeChange, StoredNode

DEVICE: Final = "device"
"""Tier of the blocks."""

HOST: Final = "host"
"""Tier of the values that the engine keeps beside its blocks."""

MAX_NODES: Final = 1 << 17
"""Nodes that are followed at most. The rest of a path that exceeds it is not announced."""

B = TypeVar("B", bound=Hashable)


@dataclass(frozen=True, slots=True)
class PathSegment:
    """One segment of a prompt.

    Attributes:
        node: What is announced of it, as exact.
        num_blocks: Full blocks from the start of the prompt up to the segment's end.
    """

    node: StoredNode
    num_blocks: int


class _Node(Generic[B]):
    """A followed node. Its blocks are those after the blocks of the nodes before it.

    Attributes:
        base: The closest node above that has blocks. None: no node above has any.
        bridges: The nodes between this one and its base, first to last. They have no blocks.
        missing: How many of its blocks are not cached.
        resident: See the module. For a node without blocks: how many resident nodes it leads to.
        waiting: Nodes with this base that are resident as soon as this one is.
        above: Resident nodes with this base.
        pins: Prompts in the engine that contain it.
        num_children: Followed nodes whose parent it is.
        host_exact: Whether its value beside the blocks is exact. None: there is none.
        announced: The last change that was taken.
    """

    __slots__ = (
        "above",
        "announced",
        "base",
        "blocks",
        "bridges",
        "host_exact",
        "missing",
        "num_children",
        "parent",
        "pins",
        "resident",
        "stored",
        "waiting",
    )

    def __init__(self, stored: StoredNode, parent: _Node[B] | None, blocks: tuple[B, ...]) -> None:
        self.stored = stored
        self.parent = parent
        self.blocks = blocks
        self.base: _Node[B] | None = None
        self.bridges: tuple[_Node[B], ...] = ()
        self.missing = len(blocks)
        self.resident = 0
        self.waiting: set[_Node[B]] = set()
        self.above: set[_Node[B]] = set()
        self.pins = 0
        self.num_children = 0
        self.host_exact: bool | None = None
        self.announced: tuple[str, bool] = ("", False)

    @property
    def state(self) -> tuple[str, bool]:
        """Tier and exactness to announce."""
        if self.resident:
            return DEVICE, True
        return ("", False) if self.host_exact is None else (HOST, self.host_exact)

    @property
    def is_complete(self) -> bool:
        """Whether nothing but its base keeps it from being resident."""
        return bool(self.blocks) and not self.missing


@dataclass(slots=True)
class _FollowedBlock(Generic[B]):
    nodes: list[_Node[B]]
    cached: bool


class ResidentNodes(Generic[B]):
    """The nodes of an engine, from events of its blocks. Not safe for several threads.

    Nodes are followed while a prompt in the engine contains them, and longer while they are
    resident. So memory is bounded by the engine's blocks and prompts.
    """

    def __init__(self, max_nodes: int = MAX_NODES) -> None:
        self._max_nodes = max_nodes
        self._nodes: dict[VariantKey, _Node[B]] = {}
        self._blocks: dict[B, _FollowedBlock[B]] = {}
        self._touched: dict[VariantKey, _Node[B]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def pin(
        self, path: Sequence[PathSegment], blocks: Sequence[B], is_cached: Callable[[B], bool]
    ) -> tuple[VariantKey, ...]:
        """Follow the segments of a prompt that the engine got.

        Args:
            path: The prompt's segments, first to last, with ascending num_blocks.
            blocks: Names of the prompt's full blocks. A name stands for all tokens up to its end.
            is_cached: Whether a block is cached now. Called for blocks that are not followed yet.

        Returns:
            The nodes to unpin when the prompt has ended. They lack a segment that cannot be
            followed, and those after it.
        """
        pinned: list[VariantKey] = []
        parent: _Node[B] | None = None
        begin = 0
        for segment in path:
            end = segment.num_blocks
            node = self._nodes.get(segment.node.key)
            if node is None:
                if end > len(blocks) or len(self._nodes) >= self._max_nodes:
                    break
                node = self._follow(segment.node, parent, tuple(blocks[begin:end]), is_cached)
            elif node.blocks and (end > len(blocks) or node.blocks[-1] != blocks[end - 1]):
                # The same tokens have other blocks: a client's salt that is not the domain's.
                break
            node.pins += 1
            pinned.append(segment.node.key)
            parent, begin = node, end
        return tuple(pinned)

    def unpin(self, keys: Sequence[VariantKey]) -> None:
        """Follow nodes no longer than they are resident, for one prompt that has ended.

        Args:
            keys: What ``pin`` returned.
        """
        for key in reversed(keys):
            node = self._nodes[key]
            node.pins -= 1
            self._forget_unused(node)

    def follows(self, block: B) -> bool:
        """Return whether a block belongs to a followed node."""
        return block in self._blocks

    def set_cached(self, block: B, cached: bool) -> None:
        """Record whether a block is cached. Blocks that are not followed are ignored."""
        entry = self._blocks.get(block)
        if entry is None or entry.cached is cached:
            return
        entry.cached = cached
        for node in tuple(entry.nodes):
            node.missing += -1 if cached else 1
            if cached:
                if not node.missing and (node.base is None or node.base.resident):
                    self._enter(node)
                elif not node.missing:
                    assert node.base is not None
                    node.base.waiting.add(node)
            else:
                if node.base is not None:
                    node.base.waiting.discard(node)
                if node.resident:
                    self._leave(node)
                self._forget_unused(node)

    def clear_blocks(self) -> None:
        """Record that no block is cached any more."""
        for block in [name for name, entry in self._blocks.items() if entry.cached]:
            self.set_cached(block, False)

    def set_host(self, key: VariantKey, exact: bool | None) -> None:
        """Record whether the engine has a value beside its blocks. None: it has none.

        A node that is not followed is ignored: nothing is known of it.
        """
        node = self._nodes.get(key)
        if node is not None:
            node.host_exact = exact
            self._touch(node)
            self._forget_unused(node)

    def take_changes(self) -> list[NodeChange]:
        """Return the changes since the last call, one for each node at most."""
        changes = []
        for key, node in self._touched.items():
            if node.state == node.announced:
                continue
            tier, exact = node.announced = node.state
            if not tier:
                changes.append(NodeChange(key))
                continue
            stored = node.stored
            announced = StoredNode(
                stored.key,
                stored.parent,
                stored.num_tokens,
                stored.num_bytes,
                exact,
                stored.cost_s,
            )
            changes.append(NodeChange.stored(tier, announced))
        self._touched.clear()
        return changes

    def check(self) -> None:
        """Assert the invariants. Visits every node."""
        for key, node in self._nodes.items():
            assert node.stored.key == key
            uncached = sum(not self._blocks[block].cached for block in node.blocks)
            assert node.missing == uncached
            expected = node.is_complete and (node.base is None or bool(node.base.resident))
            if node.blocks:
                assert bool(node.resident) == expected
            assert node.base is None or self._nodes[node.base.stored.key] is node.base
            assert node.pins or node.resident or node.host_exact is not None or node.num_children
        for block, entry in self._blocks.items():
            assert entry.nodes
            assert all(block in node.blocks for node in entry.nodes)

    def _follow(
        self,
        stored: StoredNode,
        parent: _Node[B] | None,
        blocks: tuple[B, ...],
        is_cached: Callable[[B], bool],
    ) -> _Node[B]:
        node = _Node(stored, parent, blocks)
        before = self._touched.get(stored.key)
        if before is not None:  # it was followed since the last call of take_changes
            node.announced = before.announced
            self._touched[stored.key] = node
        self._nodes[stored.key] = node
        if parent is not None:
            parent.num_children += 1
            if parent.blocks:
                node.base = parent
            else:
                node.base, node.bridges = parent.base, (*parent.bridges, parent)
        for block in blocks:
            entry = self._blocks.get(block)
            if entry is None:
                entry = self._blocks[block] = _FollowedBlock([], is_cached(block))
            entry.nodes.append(node)
            node.missing -= entry.cached
        if node.is_complete:
            if node.base is None or node.base.resident:
                self._enter(node)
            else:
                node.base.waiting.add(node)
        return node

    def _enter(self, node: _Node[B]) -> None:
        """Make a complete node resident, and those that wait for it."""
        entering = [node]
        while entering:
            node = entering.pop()
            node.resident = 1
            if node.base is not None:
                node.base.waiting.discard(node)
                node.base.above.add(node)
            for bridge in node.bridges:
                bridge.resident += 1
                self._touch(bridge)
            self._touch(node)
            entering.extend(node.waiting)

    def _leave(self, node: _Node[B]) -> None:
        """Make a node and all resident ones below it not resident. Drops come leaves first."""
        leaving = [node]
        for one in leaving:
            leaving.extend(one.above)
        for one in reversed(leaving):
            one.resident = 0
            self._touch(one)
            for bridge in reversed(one.bridges):
                bridge.resident -= 1
                self._touch(bridge)
            if one.base is not None:
                one.base.above.discard(one)
                if one.is_complete:
                    one.base.waiting.add(one)
        for one in reversed(leaving[1:]):
            self._forget_unused(one)

    def _touch(self, node: _Node[B]) -> None:
        self._touched.pop(node.stored.key, None)
        self._touched[node.stored.key] = node

    def _forget_unused(self, node: _Node[B] | None) -> None:
        """Stop following a node that nothing needs, and then those above it."""
        while node is not None:
            needed = node.pins or node.resident or node.num_children or node.host_exact is not None
            if needed or self._nodes.get(node.stored.key) is not node:
                return
            del self._nodes[node.stored.key]
            for block in node.blocks:
                entry = self._blocks[block]
                entry.nodes.remove(node)
                if not entry.nodes:
                    del self._blocks[block]
            if node.base is not None:
                node.base.waiting.discard(node)
            if node.parent is not None:
                node.parent.num_children -= 1
            node = node.parent
