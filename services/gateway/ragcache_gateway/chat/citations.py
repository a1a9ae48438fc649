"""Citations: which retrieved chunks an answer comes from."""

from __future__ import annotations

from collections.abc import Iterable

from ragcache_gateway.chat.schema import Citation
from ragcache_gateway.documents.search_schema import updated_text
from ragcache_gateway.prompts.passages import Passage

PREVIEW_CHARS = 200
_PREVIEW_SOURCE_CHARS = 4 * PREVIEW_CHARS


def cite(passages: Iterable[Passage]) -> list[Citation]:
    """Make a citation of each passage that is a hit, best first."""
    hits = [passage for passage in passages if passage.score is not None]
    hits.sort(key=lambda passage: -(passage.score or 0.0))
    return [
        Citation(
            document_id=passage.chunk.document_id,
            title=passage.chunk.title,
            chunk=passage.chunk.id,
            heading_path=list(passage.chunk.heading_path),
            score=round(passage.score or 0.0, 6),
            version=passage.chunk.content_hash,
            updated=updated_text(passage.chunk.updated_unix_ms),
            text_preview=preview(passage.chunk.text),
        )
        for passage in hits
    ]


def preview(text: str) -> str:
    """Return the beginning of a text on one line."""
    # Only the beginning is split: the rest of a long chunk cannot change the result.
    num_chars = _PREVIEW_SOURCE_CHARS
    line = " ".join(text[:num_chars].split())
    while len(line) <= PREVIEW_CHARS and num_chars < len(text):
        num_chars *= 4
        line = " ".join(text[:num_chars].split())
    return line if len(line) <= PREVIEW_CHARS else line[: PREVIEW_CHARS - 1] + "…"
