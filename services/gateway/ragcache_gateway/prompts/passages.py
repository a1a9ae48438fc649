"""Which retrieved chunks a prompt contains, and in what order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragcache_core.errors import InvalidInput
from ragcache_wire.v1 import retriever_pb2 as pb


@dataclass(frozen=True, slots=True)
class Passage:
    """A chunk for the prompt.

    Args:
        rank: Rank of the best hit whose window has the chunk, from 0.
        score: Score of the chunk's own hit; None for a chunk that only is in a hit's window.
    """

    chunk: pb.Chunk
    rank: int
    score: float | None


def group_by_document(hits: Sequence[pb.Hit]) -> list[list[Passage]]:
    """Group hits and their windows by document, ordered by each document's best hit.

    Passages of a document are in document order, so that what a later chunk refers to comes before
    it. A chunk in several windows appears once.
    """
    documents: dict[str, dict[int, Passage]] = {}
    for rank, hit in enumerate(hits):
        document = documents.setdefault(hit.chunk.document_id, {})
        for chunk in (*hit.before, *hit.after):
            document.setdefault(chunk.ordinal, Passage(chunk, rank, None))
        known = document.get(hit.chunk.ordinal)
        if known is None or known.score is None:
            best = rank if known is None else known.rank
            document[hit.chunk.ordinal] = Passage(hit.chunk, best, hit.score)
    return [[passages[n] for n in sorted(passages)] for passages in documents.values()]


def fit_to_budget(
    documents: Sequence[Sequence[Passage]], num_tokens: Callable[[str], int], budget_tokens: int
) -> list[Passage]:
    """Select the passages that fit the budget, in prompt order.

    Whole documents are dropped first, from the lowest rank. If the last one left is still too
    long, it loses window chunks and then hits, from the lowest rank.

    Raises:
        InvalidInput: Not even the best chunk fits.
    """
    sizes = [[num_tokens(passage.chunk.text) for passage in document] for document in documents]
    num_documents = len(documents)
    total_tokens = sum(map(sum, sizes))
    while num_documents > 1 and total_tokens > budget_tokens:
        num_documents -= 1
        total_tokens -= sum(sizes[num_documents])
    if total_tokens <= budget_tokens:
        return [passage for document in documents[:num_documents] for passage in document]
    return _best_passages(documents[0], sizes[0], budget_tokens)


def _best_passages(
    document: Sequence[Passage], sizes: Sequence[int], budget_tokens: int
) -> list[Passage]:
    def importance(index: int) -> tuple[bool, int, int]:
        passage = document[index]
        return passage.score is None, passage.rank, passage.chunk.ordinal

    selected = []
    total_tokens = 0
    for index in sorted(range(len(document)), key=importance):
        total_tokens += sizes[index]
        if total_tokens > budget_tokens:
            break
        selected.append(index)
    if not selected:
        raise InvalidInput(
            "max_tokens",
            f"leaves {budget_tokens} tokens for documents, and the best chunk has {total_tokens}",
            "lower it, shorten the messages or make the collection's chunks smaller",
        )
    return [document[index] for index in sorted(selected)]
