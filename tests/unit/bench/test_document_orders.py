"""Traces have the stated overlap, and orders to compare with are those of their descriptions."""

from __future__ import annotations

import pytest

from bench.support.bursts import BurstShape, bursts, mean_jaccard
from bench.support.document_orders import (
    RECENCY,
    SORTED,
    FixedOrdering,
    exhaustive_order,
    greedy_order,
    leading_tokens,
)
from bench.support.sequences.requests import Part, PromptPart, SequenceRequest
from ragcache_core.identity.keys import KEY_BYTES
from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_core.planner.document_order import RankedDocument

A, B, C = (bytes([n]) * KEY_BYTES for n in range(3))
DOCUMENTS = [RankedDocument((one,), (10,)) for one in (A, B, C)]


@pytest.mark.parametrize("overlap", [0.0, 0.4, 0.8])
def test_questions_of_a_burst_share_the_stated_part_of_their_documents(overlap: float) -> None:
    questions = bursts(BurstShape(overlap), 50, seed=3)
    for index, question in enumerate(questions):
        assert len({*question}) == 5
        assert len({document // 10 for document in question}) == 1
        if index % 10:
            assert len({*question} & {*questions[index - 1]}) >= int(5 * overlap)


def test_more_overlap_gives_more_common_documents() -> None:
    # RAGCache++ Table 12 has 0.386 at 0.2, 0.526 at 0.6 and 0.661 at 0.8, within bursts and
    # between them.
    found = [mean_jaccard(bursts(BurstShape(one), 1000, seed=1)) for one in (0.2, 0.6, 0.8)]
    assert found == sorted(found)
    assert found[1] == pytest.approx(0.526, abs=0.05)


def test_orders_follow_the_tree() -> None:
    tree = KnowledgeTree(100)
    tree.assume("engine:a:1", "device", [A], [10])
    tree.assume("engine:a:1", "device", [C, B], [10, 10])
    start = tree.children_after([])
    assert greedy_order(start, DOCUMENTS) == (0, 1, 2)
    assert exhaustive_order(start, DOCUMENTS) == (2, 1, 0)
    assert leading_tokens(start, DOCUMENTS, (2, 1, 0)) == 20
    assert leading_tokens(None, DOCUMENTS, (2, 1, 0)) == 0


def asked(*names: str) -> SequenceRequest:
    return SequenceRequest(tuple(PromptPart(name, Part.PASSAGE, (1,)) for name in names))


def test_recency_puts_documents_first_that_were_seen_last() -> None:
    recency = FixedOrdering(RECENCY)
    assert [*recency.order(asked("a", "b"))] == [0, 1]
    assert [*recency.order(asked("c", "b", "a"))] == [2, 1, 0]
    assert [*recency.order(asked("d", "e"))] == [0, 1]


def test_documents_are_sorted_by_name() -> None:
    assert [*FixedOrdering(SORTED).order(asked("c", "a", "b"))] == [1, 2, 0]
