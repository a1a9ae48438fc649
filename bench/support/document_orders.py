"""Orders of documents to compare with ours, some with a view of the engine's cache of their own."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any, Protocol

from bench.contestants.contestant import Absent
from bench.support.sequences.requests import Part, PromptPart, SequenceRequest
from ragcache_core.identity.keys import ChunkKey, token_digest
from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_core.knowledge.predicted_cache import PredictedCache
from ragcache_core.knowledge.tree_node import TreeNode
from ragcache_core.planner.document_order import RankedDocument, order_documents

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


NO_CACHE, RANK, SORTED, RECENCY = "no_cache", "rank", "sorted", "recency"
OURS, ORACLE, CONTEXTPILOT = "ours", "oracle", "contextpilot"
ALL = (NO_CACHE, RANK, SORTED, RECENCY, OURS, ORACLE, CONTEXTPILOT)
MAX_EXHAUSTIVE = 7
"""Most documents whose orders are all tried. With more, the oracle is our search without bound."""

_SOURCE = "engine:bench"
_UNBOUNDED = 1_000_000


class Ordering(Protocol):
    """Chooses orders, and learns which prompts were computed."""

    def order(self, request: SequenceRequest) -> Sequence[int]:
        """Return the rank of the passage at each position."""

    def computed(self, request: SequenceRequest, cached_tokens: int, sent_s: float) -> None:
        """Learn from a request in its chosen order.

        Args:
            cached_tokens: As the engine reported them.
            sent_s: When it was sent, on the clock of time.monotonic.
        """


class FixedOrdering:
    """Orders that need no view of the cache: by rank, sorted by name, or latest uses first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: dict[str, tuple[int, int]] = {}
        self._questions = 0

    def order(self, request: SequenceRequest) -> Sequence[int]:
        names = [passage.name for passage in request.passages]
        if self._name == SORTED:
            return sorted(range(len(names)), key=lambda rank: names[rank])
        if self._name == RECENCY:
            return self._latest_first(names)
        return range(len(names))

    def computed(self, request: SequenceRequest, cached_tokens: int, sent_s: float) -> None:
        pass

    def _latest_first(self, names: Sequence[str]) -> Sequence[int]:
        """Put what was seen last first, in the order in which it was seen."""
        ranks = range(len(names))
        order = sorted(ranks, key=lambda rank: self._seen.get(names[rank], (1, rank)))
        self._questions += 1
        for position, rank in enumerate(order):
            self._seen[names[rank]] = (-self._questions, position)
        return order


class TreeOrdering:
    """Our order, or that of an exhaustive search, over a prediction of the engine's cache."""

    def __init__(self, *, exhaustive: bool, capacity_tokens: int, block_tokens: int) -> None:
        self._exhaustive = exhaustive
        self._tree = KnowledgeTree(100_000)
        self._cache = PredictedCache(
            self._tree, _SOURCE, capacity_tokens=capacity_tokens, block_tokens=block_tokens
        )
        self._keys: dict[str, ChunkKey] = {}

    def order(self, request: SequenceRequest) -> Sequence[int]:
        documents = [
            RankedDocument((self._key(passage),), (len(passage.token_ids),))
            for passage in request.passages
        ]
        start = self._tree.children_after([self._key(part) for part in _head(request)])
        if not self._exhaustive:
            return order_documents(start, documents).order
        if len(documents) > MAX_EXHAUSTIVE:
            return order_documents(start, documents, max_steps=_UNBOUNDED).order
        return exhaustive_order(start, documents)

    def computed(self, request: SequenceRequest, cached_tokens: int, sent_s: float) -> None:
        segments = [*_head(request), *request.passages]
        chunks = list(map(self._key, segments))
        num_tokens = [len(part.token_ids) for part in segments]
        self._cache.predict(chunks, num_tokens, time.monotonic())
        self._cache.observe_hit(chunks, cached_tokens, sent_s)

    def _key(self, part: PromptPart) -> ChunkKey:
        """Return the key of a part. As in the gateway, the keys of known chunks are remembered."""
        key = self._keys.get(part.name)
        if key is None:
            key = self._keys[part.name] = token_digest(part.token_ids)
        return key


class ContextPilotOrdering:
    """ContextPilot's live index, as its documentation uses it.

    Raises:
        Absent: The package is not installed.
    """

    def __init__(self) -> None:
        try:
            import contextpilot  # noqa: PLC0415  optional
        except ImportError as error:
            raise Absent("the package contextpilot is not installed") from error
        self._index: Any = contextpilot.ContextPilot(use_gpu=False)

    def order(self, request: SequenceRequest) -> Sequence[int]:
        names = [passage.name for passage in request.passages]
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
            [reordered], _ = self._index.reorder([names])
        order = [names.index(name) for name in reordered]
        return order if len(order) == len(names) else range(len(names))

    def computed(self, request: SequenceRequest, cached_tokens: int, sent_s: float) -> None:
        pass


def make_ordering(name: str, capacity_tokens: int, block_tokens: int) -> Ordering:
    """Return a new contestant. Raises Absent if it needs a package that is not installed."""
    if name == CONTEXTPILOT:
        return ContextPilotOrdering()
    if name in (OURS, ORACLE):
        return TreeOrdering(
            exhaustive=name == ORACLE, capacity_tokens=capacity_tokens, block_tokens=block_tokens
        )
    return FixedOrdering(name)


def reordered(request: SequenceRequest, order: Sequence[int]) -> SequenceRequest:
    passages = [request.passages[rank] for rank in order]
    tail = [part for part in request.parts if part.part is Part.TAIL]
    return SequenceRequest((*_head(request), *passages, *tail))


def _head(request: SequenceRequest) -> list[PromptPart]:
    return [part for part in request.parts if part.part in (Part.STABLE, Part.CHANGING)]
