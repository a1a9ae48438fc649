"""The longest stored prefix of a prompt in a knowledge tree."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile

from ragcache_core.identity.keys import ChunkKey
from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_core.knowledge.tree_node import TreeNode


def stored_prefix(
    tree: KnowledgeTree, chunks: Sequence[ChunkKey], sources: Collection[str] | None = None
) -> list[TreeNode]:
    """Return the longest prefix whose nodes each have an exact copy in one of the sources.

    Args:
        sources: Names of the sources that count. None: all.
    """

    def is_stored(node: TreeNode) -> bool:
        return any(
            copy.exact
            for source, copy in node.residency.items()
            if sources is None or source in sources
        )

    return list(takewhile(is_stored, tree.walk(chunks)))


def stored_tokens(
    tree: KnowledgeTree, chunks: Sequence[ChunkKey], sources: Collection[str] | None = None
) -> int:
    """Return the tokens of ``stored_prefix``."""
    return sum(node.num_tokens for node in stored_prefix(tree, chunks, sources))
