"""Which chunks a prompt contains, and in what order."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import InvalidInput
from ragcache_gateway.prompts.passages import (
    Passage,
    fit_to_budget,
    group_by_document,
)
from ragcache_wire.v1 import retriever_pb2 as pb


def chunk(document: str, ordinal: int) -> pb.Chunk:
    return pb.Chunk(
        id=f"{document}#{ordinal}",
        document_id=document,
        ordinal=ordinal,
        text=f"{document}{ordinal} " * (1 + ordinal % 3),
    )


def hit(document: str, ordinal: int, score: float = 0.5, window: int = 0) -> pb.Hit:
    return pb.Hit(
        chunk=chunk(document, ordinal),
        score=score,
        before=[chunk(document, n) for n in range(max(0, ordinal - window), ordinal)],
        after=[chunk(document, n) for n in range(ordinal + 1, ordinal + 1 + window)],
    )


def num_tokens(chunk: pb.Chunk) -> int:
    return len(chunk.text.split())


def names(passages: list[Passage]) -> list[str]:
    return [passage.chunk.id for passage in passages]


hits_lists = st.lists(
    st.builds(hit, st.sampled_from("abcd"), st.integers(0, 9), st.just(0.5), st.integers(0, 2)),
    max_size=12,
)


@given(hits=hits_lists)
def test_each_chunk_appears_once_and_documents_stay_together(hits: list[pb.Hit]) -> None:
    passages = [p for document in group_by_document(hits) for p in document]
    wanted = {c.id for h in hits for c in (h.chunk, *h.before, *h.after)}
    assert sorted(names(passages)) == sorted(wanted)
    documents = [key for key, _ in groupby(passages, lambda p: p.chunk.document_id)]
    assert documents == list(dict.fromkeys(h.chunk.document_id for h in hits))
    for _, group in groupby(passages, lambda p: p.chunk.document_id):
        ordinals = [p.chunk.ordinal for p in group]
        assert ordinals == sorted(ordinals)
    assert {p.chunk.id for p in passages if p.score is not None} == {h.chunk.id for h in hits}


@given(hits=hits_lists, budget=st.integers(0, 60))
def test_the_best_ranked_passages_that_fit_are_selected(hits: list[pb.Hit], budget: int) -> None:
    documents = group_by_document(hits)
    possible = [[p for p in one if num_tokens(p.chunk) <= budget] for one in documents]
    possible = [one for one in possible if any(p.score is not None for p in one)]
    try:
        kept = fit_to_budget(documents, num_tokens, budget)
    except InvalidInput:
        assert hits
        assert not possible
        return
    assert sum(num_tokens(p.chunk) for p in kept) <= budget
    assert bool(kept) == bool(hits) == bool(possible)
    assert [p for document in documents for p in document if p in kept] == kept
    whole = [document for document in possible if all(p in kept for p in document)]
    assert whole == possible[: len(whole)]
    if len(whole) > 1 or sum(len(document) for document in whole) == len(kept):
        assert sum(map(len, whole)) == len(kept), "no document is kept in part beside others"


def test_a_chunk_that_does_not_fit_is_skipped() -> None:
    # Chunks 0, 1 and 2 of a document have one, two and three words.
    documents = group_by_document([hit("a", 2, window=1), hit("b", 1), hit("c", 0)])
    assert names(fit_to_budget(documents, num_tokens, 2)) == ["b#1"]
    assert names(fit_to_budget(documents, num_tokens, 1)) == ["c#0"]
    with pytest.raises(
        InvalidInput, match="leaves 0 tokens for documents, and the shortest chunk has at least 1;"
    ):
        fit_to_budget(documents, num_tokens, 0)


def test_the_lowest_ranked_document_goes_first() -> None:
    documents = group_by_document([hit("b", 0), hit("a", 0), hit("a", 3)])
    assert names(fit_to_budget(documents, num_tokens, 100)) == ["b#0", "a#0", "a#3"]
    assert names(fit_to_budget(documents, num_tokens, 2)) == ["b#0"]


def test_a_single_document_loses_its_window_before_its_hits() -> None:
    documents = group_by_document([hit("a", 3, 0.9, window=1), hit("a", 0, 0.8)])
    assert names(documents[0]) == ["a#0", "a#2", "a#3", "a#4"]
    assert names(fit_to_budget(documents, num_tokens, 2)) == ["a#0", "a#3"]
    assert names(fit_to_budget(documents, num_tokens, 1)) == ["a#3"]
    with pytest.raises(InvalidInput, match="leaves 0 tokens for documents"):
        fit_to_budget(documents, num_tokens, 0)
