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
        hit_rank: Rank of the chunk's own hit, from 0.
    """

    chunk: pb.Chunk
    rank: int
    score: float | None
    hit_rank: int = 0


def passage_text(chunk: pb.Chunk) -> str:
    """Return a chunk's text as prompts have it: with its label."""
    return chunk.label + chunk.text


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
            document[hit.chunk.ordinal] = Passage(hit.chunk, best, hit.score, rank)
    return [[passages[n] for n in sorted(passages)] for passages in documents.values()]


def fit_to_budget(
    documents: Sequence[Sequence[Passage]],
    num_tokens: Callable[[pb.Chunk], int],
    budget_tokens: int,
) -> list[Passage]:
    """Select the passages that fit the budget, in prompt order.

    A chunk that alone exceeds the budget is skipped, and so is a document without another hit.
    Then whole documents are dropped, from the lowest rank. If the last one left is still too long,
    it loses window chunks and then hits, from the lowest rank.

    Raises:
        InvalidInput: There are hits, and none of them fits.
    """
    sized = [[(one, num_tokens(one.chunk)) for one in document] for document in documents]
    possible = [
        [(one, tokens) for one, tokens in document if tokens <= budget_tokens] for document in sized
    ]
    possible = [document for document in possible if any(_is_hit(one) for one, _ in document)]
    if not possible:
        _raise_if_hits(sized, budget_tokens)
        return []
    total_tokens = sum(map(_total_tokens, possible))
    while len(possible) > 1 and total_tokens > budget_tokens:
        total_tokens -= _total_tokens(possible.pop())
    if total_tokens <= budget_tokens:
        return [one for document in possible for one, _ in document]
    return _best_passages(possible[0], budget_tokens)


def _is_hit(passage: Passage) -> bool:
    return passage.score is not None


def _total_tokens(document: Sequence[tuple[Passage, int]]) -> int:
    return sum(tokens for _, tokens in document)


def _raise_if_hits(documents: Sequence[Sequence[tuple[Passage, int]]], budget_tokens: int) -> None:
    """Raise InvalidInput if there are hits and none fits."""
    sizes = [tokens for document in documents for one, tokens in document if _is_hit(one)]
    if sizes:
        raise InvalidInput(
            "max_tokens",
            f"leaves {budget_tokens} tokens for documents, and the shortest chunk has at least "
            f"{min(sizes)}",
            "lower it, shorten the messages or make the chunks smaller",
        )


def _best_passages(document: Sequence[tuple[Passage, int]], budget_tokens: int) -> list[Passage]:
    """Return the most important passages of a document that fit, at least one, in its order."""

    def importance(index: int) -> tuple[bool, int, int]:
        passage, _ = document[index]
        return not _is_hit(passage), passage.rank, passage.chunk.ordinal

    selected = []
    total_tokens = 0
    for index in sorted(range(len(document)), key=importance):
        total_tokens += document[index][1]
        if total_tokens > budget_tokens:
            break
        selected.append(index)
    return [document[index][0] for index in sorted(selected)]
