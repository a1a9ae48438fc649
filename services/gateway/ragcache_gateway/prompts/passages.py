"""Which retrieved chunks a prompt holds, and in what order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ragcache_core.errors import InvalidInput
from ragcache_gateway.chat.schema import Citation
from ragcache_wire.v1 import retriever_pb2 as pb

PREVIEW_CHARS = 200


@dataclass(frozen=True, slots=True)
class Passage:
    """A chunk for the prompt.

    rank: of the best hit that brought it, from 0. score: of the hit it is; None for a chunk that
    only came along in a hit's window.
    """

    chunk: pb.Chunk
    rank: int
    score: float | None


def by_document(hits: Sequence[pb.Hit]) -> list[list[Passage]]:
    """Passages of each document in document order; documents by the rank of their best hit.

    The chunks of a document stay together, so that what a later one calls "it" stands before it;
    one that several hits bring is there once.
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


def fit(
    documents: Sequence[Sequence[Passage]], num_tokens: Callable[[str], int], budget_tokens: int
) -> list[Passage]:
    """Passages in prompt order whose tokens fit the budget.

    Whole documents go first, the lowest-ranked before the others. A document left alone and still
    too long loses window chunks, then hits, the lowest-ranked first. Raises InvalidInput if not
    even its best chunk fits.
    """
    sizes = [[num_tokens(passage.chunk.text) for passage in document] for document in documents]
    kept = len(documents)
    total = sum(map(sum, sizes))
    while kept > 1 and total > budget_tokens:
        kept -= 1
        total -= sum(sizes[kept])
    if total <= budget_tokens:
        return [passage for document in documents[:kept] for passage in document]
    return _best_of(documents[0], sizes[0], budget_tokens)


def _best_of(
    document: Sequence[Passage], sizes: Sequence[int], budget_tokens: int
) -> list[Passage]:
    def worth(index: int) -> tuple[bool, int, int]:
        passage = document[index]
        return passage.score is None, passage.rank, passage.chunk.ordinal

    kept = []
    total = 0
    for index in sorted(range(len(document)), key=worth):
        total += sizes[index]
        if total > budget_tokens:
            break
        kept.append(index)
    if not kept:
        raise InvalidInput(
            "max_tokens",
            f"leaves {budget_tokens} tokens for documents, and the best chunk has {total}",
            "lower it, shorten the messages or make the collection's chunks smaller",
        )
    return [document[index] for index in sorted(kept)]


def citations(passages: Iterable[Passage]) -> list[Citation]:
    """The hits among the passages, best first."""
    hits = [p for p in passages if p.score is not None]
    hits.sort(key=lambda p: -(p.score or 0.0))
    return [
        Citation(
            document_id=p.chunk.document_id,
            title=p.chunk.title,
            chunk=p.chunk.id,
            heading_path=list(p.chunk.heading_path),
            score=round(p.score or 0.0, 6),
            text_preview=preview(p.chunk.text),
        )
        for p in hits
    ]


def preview(text: str) -> str:
    """The beginning of a text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= PREVIEW_CHARS else line[: PREVIEW_CHARS - 1] + "…"
