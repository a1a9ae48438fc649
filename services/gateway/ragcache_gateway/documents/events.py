"""Events of documents: text was removed, a document was written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ragcache_core.plan.reuse_plan import document_name


@dataclass(frozen=True, slots=True)
class TextRemoved:
    """A document was deleted, or has lost text.

    Args:
        document: Name of the document in reuse plans; None: any document may have lost text.
        learned_at_ms: Unix time at which this gateway learned of it. What was planned until then
            may contain the text.
    """

    document: str | None
    learned_at_ms: int


@dataclass(frozen=True, slots=True)
class WrittenDocument:
    """This gateway has written a document, and the retriever has changed it.

    Args:
        chunks: Texts of its chunks, in order.
        written_at_ms: Unix time after the write, and after each removal learned until then.
    """

    collection: str
    document_id: str
    chunks: tuple[str, ...]
    written_at_ms: int

    @property
    def document_name(self) -> str:
        """Name of the document in reuse plans."""
        return document_name(self.collection, self.document_id)


RemovalSubscriber = Callable[[TextRemoved], None]
"""Drops what it keeps of the text."""

WriteSubscriber = Callable[[WrittenDocument], None]
