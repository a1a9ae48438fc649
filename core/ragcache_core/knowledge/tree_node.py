"""A node of the knowledge tree."""

from __future__ import annotations

from ragcache_core.identity.keys import ChunkKey, VariantKey
from ragcache_core.knowledge.stored_node import Residency


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
