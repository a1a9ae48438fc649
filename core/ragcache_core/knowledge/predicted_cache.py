"""What an engine that reports nothing must have in its prefix cache.

It follows from the prompts that were sent to it, an assumed capacity, and the least recently used
order in which vLLM evicts blocks. The cached tokens that the engine reports with an answer
contradict what it no longer has.

Source: RAGCache++ section 3.4, which leaves the pruning to future work.
"""

from __future__ import annotations

from collections.abc import Sequence

from ragcache_core.identity.keys import ChunkKey
from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_core.knowledge.tree_node import TreeNode

TIER = "device"


class PredictedCache:
    """Records in the knowledge tree what one engine must have. Not safe for several threads.

    Args:
        source: Name of the engine in the tree.
        capacity_tokens: Tokens that its prefix cache has space for.
        block_tokens: Tokens of one block. An engine finds whole blocks only.
    """

    def __init__(
        self, tree: KnowledgeTree, source: str, *, capacity_tokens: int, block_tokens: int
    ) -> None:
        if capacity_tokens < 1 or block_tokens < 1:
            raise ValueError("capacity_tokens and block_tokens have to be positive")
        self._tree = tree
        self._source = source
        self._capacity_tokens = capacity_tokens
        self._block_tokens = block_tokens
        self._num_tokens = 0
        # Tokens of each node and the time of its last prompt, least recently used first. The nodes
        # of a prompt follow each other from the last to the first, so the first one is a leaf.
        self._uses: dict[TreeNode, tuple[int, float]] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens that the engine is assumed to have."""
        return self._num_tokens

    def predict(self, chunks: Sequence[ChunkKey], num_tokens: Sequence[int], now_s: float) -> None:
        """Record a prompt that is sent to the engine.

        Args:
            num_tokens: Length of each chunk.
            now_s: Seconds of a clock that never goes back.
        """
        for node in reversed(self._tree.assume(self._source, TIER, chunks, num_tokens)):
            known_tokens, _ = self._uses.pop(node, (0, 0.0))
            self._num_tokens += node.num_tokens - known_tokens
            self._uses[node] = node.num_tokens, now_s
        while self._num_tokens > self._capacity_tokens:
            self._retract(next(iter(self._uses)))

    def observe_hit(self, chunks: Sequence[ChunkKey], cached_tokens: int, before_s: float) -> None:
        """Remove what the cached tokens of a prompt contradict.

        A chunk whose blocks were not found is gone, and so is all that was computed after it. The
        chunks of the prompt itself stay, because the engine has computed them now.

        Args:
            cached_tokens: Tokens of the prompt that the engine found in its prefix cache.
            before_s: Only what was predicted before this time is contradicted. It is the time at
                which the oldest request was sent that the engine was computing at the same time.
        """
        end = 0
        on_path: set[TreeNode] = set()
        missing: TreeNode | None = None
        for node in self._tree.walk(chunks):
            end += node.num_tokens
            on_path.add(node)
            if missing is None and end >= cached_tokens + self._block_tokens:
                missing = node
        below = [missing] if missing is not None else []
        while below:
            node = below.pop()
            _, used_s = self._uses.get(node, (0, before_s))
            # A node without a use has no used one after it.
            if node in on_path or used_s < before_s:
                below.extend((node.children or {}).values())
            if node not in on_path and used_s < before_s:
                self._retract(node)

    def clear(self) -> None:
        """Remove all, as after a restart of the engine."""
        for node in list(self._uses):
            self._retract(node)

    def _retract(self, node: TreeNode) -> None:
        num_tokens, _ = self._uses.pop(node)
        self._num_tokens -= num_tokens
        self._tree.retract(self._source, node)
