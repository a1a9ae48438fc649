"""Order the documents of a prompt so that it begins as a stored prompt does.

An engine reuses the KV of a prefix. So documents that earlier prompts had in common are reused only
if they come first and in the same order.

Source: RAGCache++ section 3.3, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ragcache_core.identity.keys import ChunkKey
from ragcache_core.knowledge.tree_node import TreeNode

MAX_STEPS = 12
"""Most nodes of the tree whose children are examined.

With five documents, 8 steps save 0.98 of what an exhaustive search saves, 10 steps 0.995 and 12
steps 0.998 (``bench/planner.py``).
"""

# Nodes that may follow, ranks that remain, their tokens, stored tokens, and ranks so far.
_Path = tuple[Mapping[ChunkKey, TreeNode], tuple[int, ...], int, int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """The chunks of one document in a prompt, which stay together and in document order.

    Attributes:
        chunks: Key of each chunk.
        num_tokens: Length of each chunk.
    """

    chunks: tuple[ChunkKey, ...]
    num_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DocumentOrder:
    """An order of documents.

    Attributes:
        order: Rank of the document at each position, from 0.
        cached_tokens: Tokens of the leading chunks that are stored after this path.
        rank_cached_tokens: The same for the order of the ranks.
    """

    order: tuple[int, ...]
    cached_tokens: int
    rank_cached_tokens: int


def order_documents(
    start: Mapping[ChunkKey, TreeNode] | None,
    documents: Sequence[RankedDocument],
    *,
    max_displacement: int | None = None,
    sources: Collection[str] | None = None,
    max_steps: int = MAX_STEPS,
) -> DocumentOrder:
    """Return the order with the most stored tokens at the beginning.

    The search is a depth-first walk of the tree. Its first path is a greedy walk as in Algorithm 1,
    which takes the longest of the stored documents instead of the one of the best rank. The search
    then continues with the alternatives, until none can be better or after ``max_steps``. Documents
    after the stored ones follow in rank order. If no order has more stored tokens than that of the
    ranks, documents keep their ranks.

    Args:
        start: Nodes after the template's head, by chunk key. None: nothing is stored there.
        documents: Best rank first.
        max_displacement: Most positions that a document may move from its rank. None: no limit.
        sources: Only exact copies in these sources count. None: in any source.
    """
    num_documents = len(documents)
    ranks = tuple(range(num_documents))
    in_rank_order = _cached_tokens(start, documents, sources)
    best_tokens, best = in_rank_order, ranks
    limit = num_documents if max_displacement is None else max_displacement
    sizes = [sum(document.num_tokens) for document in documents]
    firsts = [document.chunks[0] for document in documents]
    paths: list[_Path] = [(start, ranks, sum(sizes), 0, ())] if start and limit > 0 else []
    while paths and max_steps > 0:
        nodes, remaining, remaining_tokens, saved, placed = paths.pop()
        if saved + remaining_tokens <= best_tokens:
            continue
        max_steps -= 1
        position = len(placed)
        # The best rank that remains has been overtaken most often, so it reaches the limit first.
        last = position + limit if position - remaining[0] < limit else remaining[0]
        found: list[_Path] = []
        for rank in remaining:
            if rank > last:
                break
            node = nodes.get(firsts[rank])
            if node is None or not _is_stored(node, sources):
                continue
            after: Mapping[ChunkKey, TreeNode] | None = node.children
            tokens = saved + sizes[rank]
            if len(documents[rank].chunks) > 1:
                after, tokens = _advance(nodes, documents[rank], sources)
                tokens += saved
            is_best = tokens > best_tokens
            rest_tokens = remaining_tokens - sizes[rank] if after else 0
            if not is_best and tokens + rest_tokens <= best_tokens:
                continue
            rest = tuple([other for other in remaining if other != rank])
            path = (*placed, rank)
            if is_best:
                best_tokens, best = tokens, path + rest
            if after and rest_tokens:
                found.append((after, rest, rest_tokens, tokens, path))
        if len(found) > 1:
            found.reverse()
            found.sort(key=_saved_tokens)  # stable, so equal ones stay with the best rank last
        paths.extend(found)
    return DocumentOrder(best, best_tokens, in_rank_order)


def _saved_tokens(path: _Path) -> int:
    return path[3]


def _cached_tokens(
    children: Mapping[ChunkKey, TreeNode] | None,
    documents: Sequence[RankedDocument],
    sources: Collection[str] | None,
) -> int:
    """Return the tokens of the leading chunks that are stored in rank order."""
    cached = 0
    for document in documents:
        children, tokens = _advance(children, document, sources)
        cached += tokens
        if not children:
            break
    return cached


def _advance(
    children: Mapping[ChunkKey, TreeNode] | None,
    document: RankedDocument,
    sources: Collection[str] | None,
) -> tuple[Mapping[ChunkKey, TreeNode] | None, int]:
    """Walk the chunks of a document.

    Returns:
        The nodes after the document, or None if a chunk of it is not stored or nothing is after it;
        and the tokens of the chunks that are stored.
    """
    tokens = 0
    for chunk, chunk_tokens in zip(document.chunks, document.num_tokens, strict=False):
        node = children.get(chunk) if children else None
        if node is None or not _is_stored(node, sources):
            return None, tokens
        tokens += chunk_tokens
        children = node.children
    return children, tokens


def _is_stored(node: TreeNode, sources: Collection[str] | None) -> bool:
    if sources is None:
        return node.is_exact
    for source, residency in node.residency.items():
        if residency.exact and source in sources:
            return True
    return False
