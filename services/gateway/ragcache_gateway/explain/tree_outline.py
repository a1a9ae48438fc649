"""The hottest part of the knowledge tree in the REST API."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Final, Literal

from pydantic import BaseModel, Field

from ragcache_core.identity.keys import ChunkKey
from ragcache_core.knowledge.hottest_nodes import HottestNodes, with_ancestors
from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_core.knowledge.tree_node import TreeNode
from ragcache_gateway.explain.explanation import PromptPart, RecentAnswers
from ragcache_gateway.shown_address import ShownText

MAX_OUTLINED: Final = 500
DEFAULT_OUTLINED: Final = 200

SLICE_NODES: Final = 1024
"""Nodes that are visited at a time, about a millisecond, before requests get their turn."""

RANKING_AGE_S: Final = 5.0
"""For this time the same nodes count as the hottest ones. Tiers and uses are always current."""

_SHOWN_KEY_BYTES: Final = 8


class OutlinedCopy(BaseModel):
    """One copy of a node's KV."""

    source: ShownText = Field(description="engine:ADDRESS or store:ADDRESS.")
    tier: str = Field(description="device or host of an engine, memory or disk of a cache store.")
    exact: bool = Field(description="Whether it equals what an engine would compute.")


class OutlinedNode(BaseModel):
    """One chunk, or part of the template, after the nodes above it."""

    parent: int | None = Field(
        description="Index of the node before it; null at the start of a prompt."
    )
    depth: int = Field(description="Number of nodes before it in its prompt.")
    key: str = Field(
        description="Beginning of its chunk key, to tell nodes without a name apart. Empty without "
        "the scope admin, if the caller's own answers do not have it."
    )
    kind: Literal["chunk", "template", "unknown"] = Field(
        description="unknown: none of the latest answers of this gateway has it in its prompt."
    )
    chunk: str | None = Field(description="Id of the chunk.")
    document_id: str | None
    title: str | None
    tokens: int = Field(description="0: not known yet.")
    bytes: int = Field(description="Size of its value in a cache store; 0: not known.")
    uses: float = Field(
        description="Uses by prompts of this gateway; each counts half after an hour. A new node "
        "begins as if it had a sixteenth of a use."
    )
    cost_ms: float | None = Field(description="What computing it took. Null: not known.")
    copies: list[OutlinedCopy] = Field(description="Empty: it was evicted everywhere.")
    children: int = Field(description="Nodes right after it in the tree.")
    children_cut: int = Field(description="Of these, the ones that this list leaves out.")


class TreeOutline(BaseModel):
    """The hottest nodes with all nodes before them.

    A node comes right after its parent or after the subtree of a hotter sibling.
    """

    total: int = Field(description="Nodes of the whole tree.")
    nodes: list[OutlinedNode]


class TreeReader:
    """Reads the knowledge tree for people. For one event loop.

    Args:
        recent: Names chunks.
        clock: The clock of the tree's uses, in seconds.
    """

    def __init__(
        self, tree: KnowledgeTree, recent: RecentAnswers, clock: Callable[[], float]
    ) -> None:
        self._tree = tree
        self._recent = recent
        self._clock = clock
        self._lock = asyncio.Lock()
        self._hottest: list[TreeNode] = []
        self._ranked_s = -math.inf

    async def read(
        self, max_nodes: int, tenant: str | None = None, *, of_any_tenant: bool = False
    ) -> TreeOutline:
        """Return the hottest nodes. Other requests get their turn meanwhile.

        Args:
            max_nodes: Most nodes, at most MAX_OUTLINED.
            tenant: Whose answers name nodes; None: those of callers without a tenant.
            of_any_tenant: Whether answers of any tenant do. Otherwise, other nodes have no key: it
                would tell whether another tenant has the KV of a known text.
        """
        async with self._lock:
            if self._clock() - self._ranked_s > RANKING_AGE_S:
                self._hottest = await self._rank()
                self._ranked_s = self._clock()
        hottest = (node for node in self._hottest if not node.is_removed)
        nodes = with_ancestors(hottest, max_nodes)
        keys = {node.chunk for node in nodes}
        parts = self._recent.parts_of(keys, tenant, of_any_tenant=of_any_tenant)
        return self._outline(nodes, parts, shows_keys=of_any_tenant)

    async def _rank(self) -> list[TreeNode]:
        ranking = HottestNodes(self._tree, MAX_OUTLINED)
        has_more = True
        while has_more:
            has_more = ranking.visit(SLICE_NODES)
            await asyncio.sleep(0)
        return ranking.nodes()

    def _outline(
        self, nodes: list[TreeNode], parts: Mapping[ChunkKey, PromptPart], *, shows_keys: bool
    ) -> TreeOutline:
        now_s = self._clock()
        indexes = {node: index for index, node in enumerate(nodes)}
        outlined: list[OutlinedNode] = []
        for node in nodes:
            parent = None if node.parent is None else indexes[node.parent]
            depth = 0 if parent is None else outlined[parent].depth + 1
            uses = self._tree.frequency(node, now_s)
            part = parts.get(node.chunk)
            outlined.append(_outline_node(node, parent, depth, uses, part))
            if part is None and not shows_keys:
                outlined[-1].key = ""
            if parent is not None:
                outlined[parent].children_cut -= 1
        return TreeOutline(total=len(self._tree), nodes=outlined)


def _outline_node(
    node: TreeNode, parent: int | None, depth: int, uses: float, part: PromptPart | None
) -> OutlinedNode:
    """Outline a node as if all its children were left out."""
    children = len(node.children or ())
    kind: Literal["chunk", "template", "unknown"] = "unknown"
    if part is not None:
        kind = "template" if part.chunk is None else "chunk"
    return OutlinedNode(
        parent=parent,
        depth=depth,
        key=node.chunk[:_SHOWN_KEY_BYTES].hex(),
        kind=kind,
        chunk=part.chunk if part else None,
        document_id=part.document_id if part else None,
        title=part.title if part else None,
        tokens=node.num_tokens,
        bytes=node.num_bytes,
        uses=round(uses, 4),
        cost_ms=round(1e3 * node.cost_s, 3) if node.cost_s else None,
        copies=[
            OutlinedCopy(source=source, tier=residency.tier, exact=residency.exact)
            for source, residency in sorted(node.residency.items())
        ],
        children=children,
        children_cut=children,
    )
