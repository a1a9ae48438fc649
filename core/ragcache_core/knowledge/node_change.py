"""A change of a source: in which tier it has a node from now on."""

from __future__ import annotations

from dataclasses import dataclass

from ragcache_core.identity.keys import VariantKey
from ragcache_core.knowledge.stored_node import StoredNode


@dataclass(frozen=True, slots=True)
class NodeChange:
    """Where a source has one node from now on.

    A change describes the whole state of the node, so the last one of a node is all that counts.

    Attributes:
        key: The node's key.
        tier: The source's fastest tier that has it. Empty: the source has it no more.
        node: What the source knows of it. None if it has it no more.
    """

    key: VariantKey
    tier: str = ""
    node: StoredNode | None = None

    @classmethod
    def stored(cls, tier: str, node: StoredNode) -> NodeChange:
        """Return the change after which a source has a node in a tier."""
        return cls(node.key, tier, node)
