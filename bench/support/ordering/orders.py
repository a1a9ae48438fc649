"""Orders of documents to compare with: RAGCache++'s greedy walk, sorted, recency, exhaustive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

from ragcache_core.identity.keys import ChunkKey
from ragcache_core.knowledge.tree_node import TreeNode
from ragcache_core.planner.document_order import RankedDocument

Nodes = Mapping[ChunkKey, TreeNode] | None


def leading_tokens(start: Nodes, documents: Sequence[RankedDocument], order: Sequence[int]) -> int:
    """Return the tokens of the leading chunks that are stored if documents have this order."""
    tokens = 0
    nodes = start
    for rank in order:
        document = documents[rank]
        for chunk, chunk_tokens in zip(document.chunks, document.num_tokens, strict=True):
            node = nodes.get(chunk) if nodes else None
            if node is None or not node.is_exact:
                return tokens
            tokens += chunk_tokens
            nodes = node.children
    return tokens


def greedy_order(start: Nodes, documents: Sequence[RankedDocument]) -> tuple[int, ...]:
    """Return the order of RAGCache++ Algorithm 1, for documents of one chunk."""
    order: list[int] = []
    remaining = list(range(len(documents)))
    nodes = start
    while nodes:
        found = None
        for rank in remaining:
            node = nodes.get(documents[rank].chunks[0])
            if node is not None and node.is_exact:
                found = node
                order.append(rank)
                remaining.remove(rank)
                break
        nodes = found.children if found is not None else None
    return (*order, *remaining)


def exhaustive_order(start: Nodes, documents: Sequence[RankedDocument]) -> tuple[int, ...]:
    """Return the order with the most stored tokens; of equal ones the first by ranks."""
    return max(
        permutations(range(len(documents))),
        key=lambda order: leading_tokens(start, documents, order),
    )


def sorted_order(names: Sequence[str]) -> tuple[int, ...]:
    return tuple(sorted(range(len(names)), key=lambda rank: names[rank]))


class Recency:
    """Puts the documents first that were seen last, in the order in which they were seen."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}
        self._questions = 0

    def order(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return the order of a question's documents, and remember it."""
        order = tuple(
            sorted(range(len(names)), key=lambda rank: self._seen.get(names[rank], (1, rank)))
        )
        self._questions += 1
        for position, rank in enumerate(order):
            self._seen[names[rank]] = (-self._questions, position)
        return order
