"""Citations: which retrieved chunks an answer comes from."""

from __future__ import annotations

from collections.abc import Iterable

from ragcache_gateway.chat.schema import Citation
from ragcache_gateway.documents.search_schema import updated_text
from ragcache_gateway.prompts.passages import Passage

PREVIEW_CHARS = 200


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
    line = " ".join(text.split())
    return line if len(line) <= PREVIEW_CHARS else line[: PREVIEW_CHARS - 1] + "…"
