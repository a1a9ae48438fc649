"""The order of documents follows the tree, keeps every document and stays within its limit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.identity.keys import KEY_BYTES, ChunkKey
from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_core.planner.document_order import DocumentOrder, RankedDocument, order_documents
from tests.kit.stored_prefix import stored_prefix

SOURCE = "engine:a:1"
HEAD = b"h" * KEY_BYTES
CHUNKS = [bytes([i]) * KEY_BYTES for i in range(8)]
A, B, C, D, E = CHUNKS[:5]


@st.composite
def ranked(draw: st.DrawFn) -> list[RankedDocument]:
    """Up to five documents of one or two chunks, which appear once."""
    chunks = draw(st.permutations(CHUNKS))
    documents = []
    for _ in range(draw(st.integers(1, 5))):
        size = draw(st.integers(1, 2)) if len(chunks) > 1 else 1
        own, chunks = tuple(chunks[:size]), chunks[size:]
        documents.append(RankedDocument(own, tuple(draw(st.integers(1, 9)) for _ in own)))
        if not chunks:
            break
    return documents


def tree_of(paths: Sequence[Sequence[ChunkKey]]) -> KnowledgeTree:
    tree = KnowledgeTree(10_000)
    for path in paths:
        tree.assume(SOURCE, "device", [HEAD, *path], [1] * (len(path) + 1))
    return tree


def single(*chunks: ChunkKey) -> list[RankedDocument]:
    return [RankedDocument((chunk,), (10,)) for chunk in chunks]


def stored_tokens(
    tree: KnowledgeTree, documents: Sequence[RankedDocument], order: Sequence[int]
) -> int:
    chunks = [HEAD, *(chunk for rank in order for chunk in documents[rank].chunks)]
    tokens = [0, *(size for rank in order for size in documents[rank].num_tokens)]
    return sum(tokens[: len(stored_prefix(tree, chunks))])


def exhaustive(
    tree: KnowledgeTree, documents: Sequence[RankedDocument], limit: int | None = None
) -> int:
    return max(
        stored_tokens(tree, documents, order)
        for order in permutations(range(len(documents)))
        if limit is None or all(abs(i - rank) <= limit for i, rank in enumerate(order))
    )


stored_paths = st.lists(
    st.lists(st.sampled_from(CHUNKS), min_size=1, max_size=5, unique=True), max_size=12
)
limits = st.none() | st.integers(0, 4)


@given(stored_paths, ranked(), limits, st.integers(1, 40))
def test_no_document_is_dropped_and_none_moves_too_far(
    paths: list[list[ChunkKey]], documents: list[RankedDocument], limit: int | None, steps: int
) -> None:
    start = tree_of(paths).children_after([HEAD])
    found = order_documents(start, documents, max_displacement=limit, max_steps=steps)
    assert sorted(found.order) == list(range(len(documents)))
    if limit is not None:
        assert all(abs(i - rank) <= limit for i, rank in enumerate(found.order))


@given(stored_paths, ranked(), limits)
def test_with_enough_steps_no_order_within_the_limit_is_better(
    paths: list[list[ChunkKey]], documents: list[RankedDocument], limit: int | None
) -> None:
    tree = tree_of(paths)
    start = tree.children_after([HEAD])
    found = order_documents(start, documents, max_displacement=limit, max_steps=10_000)
    assert found.cached_tokens == stored_tokens(tree, documents, found.order)
    assert found.cached_tokens == exhaustive(tree, documents, limit)
    assert found.rank_cached_tokens == stored_tokens(tree, documents, range(len(documents)))


@given(stored_paths, ranked(), st.integers(1, 40))
def test_an_order_is_never_worse_than_that_of_the_ranks(
    paths: list[list[ChunkKey]], documents: list[RankedDocument], steps: int
) -> None:
    start = tree_of(paths).children_after([HEAD])
    found = order_documents(start, documents, max_steps=steps)
    assert found.cached_tokens >= found.rank_cached_tokens
    if found.cached_tokens == found.rank_cached_tokens:
        assert found.order == tuple(range(len(documents)))


def test_the_greedy_walk_follows_algorithm_1() -> None:
    tree = tree_of([[C, A, E]])
    found = order_documents(tree.children_after([HEAD]), single(A, B, C, D))
    assert found == DocumentOrder((2, 0, 1, 3), 20, 0)


def test_a_longer_path_wins_over_the_greedy_one() -> None:
    start = tree_of([[A], [B, C, D]]).children_after([HEAD])
    assert order_documents(start, single(A, B, C, D), max_steps=1).order == (0, 1, 2, 3)
    assert order_documents(start, single(A, B, C, D)).order == (1, 2, 3, 0)


def test_without_stored_documents_ranks_decide() -> None:
    tree = tree_of([[E]])
    assert order_documents(tree.children_after([HEAD]), single(A, B)).order == (0, 1)
    assert order_documents(tree.children_after([E]), single(A, B)).order == (0, 1)
    assert order_documents(None, []).order == ()


def test_a_part_of_a_document_counts_and_ends_the_walk() -> None:
    tree = tree_of([[B, C]])
    documents = [RankedDocument((A,), (5,)), RankedDocument((B, D), (7, 9))]
    assert order_documents(tree.children_after([HEAD]), documents) == DocumentOrder((1, 0), 7, 0)


def test_only_the_named_sources_count() -> None:
    tree = tree_of([[B]])
    start = tree.children_after([HEAD])
    assert order_documents(start, single(A, B), sources={"engine:b:1"}).order == (0, 1)
    assert order_documents(start, single(A, B), sources={SOURCE}).order == (1, 0)
