"""What the knowledge tree knows of a prompt: its longest stored prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragcache_core.knowledge.tree_node import TreeNode


@dataclass(frozen=True, slots=True)
class Match:
    """The nodes of a prompt's first chunks, each with an exact copy in some source."""

    nodes: tuple[TreeNode, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all nodes."""
        return sum(node.num_tokens for node in self.nodes)

    def tokens_at(self, sources: Sequence[str]) -> int:
        """Return the tokens of the longest prefix that these sources have together."""
        num_tokens = 0
        for node in self.nodes:
            copies = (node.residency.get(source) for source in sources)
            if not any(copy is not None and copy.exact for copy in copies):
                break
            num_tokens += node.num_tokens
        return num_tokens
