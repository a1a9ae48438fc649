"""The tables of one generation's words and embeddings, which each database has in its own way.

Changes need a transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ragcache_retriever.documents.chunking import Chunk
from ragcache_retriever.store.records import LexicalHit, Rows, Vectors


@dataclass(frozen=True, slots=True)
class LexicalText:
    """The text of a chunk that is searched by words."""

    row: int
    title: str
    headings: Sequence[str]
    text: str


class LexicalTables(Protocol):
    """The words of chunks."""

    def create(self, generation: int) -> None:
        """Create the tables of a new generation."""

    def add(self, generation: int, texts: Sequence[LexicalText]) -> None:
        """Add the words of chunks."""

    def remove(self, generation: int, texts: Sequence[LexicalText]) -> None:
        """Remove the words of chunks, which have the same texts as when they were added."""

    def has(self, generation: int) -> bool:
        """Whether the words of a generation are not detached."""

    def detach(self, generation: int) -> None:
        """Let no search use the words of a generation. Repeating it changes nothing."""

    def remove_some(self, generation: int) -> bool:
        """Remove a bounded number of pages of detached words. Return whether there were any."""

    def hits(
        self,
        generation: int,
        terms: Sequence[str],
        limit: int,
        *,
        allowed: Rows | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[LexicalHit]:
        """Return the chunks of a generation that fit terms best, best first; ties by row.

        Chunks with more of the identifiers come first, then those with a higher BM25. Identifiers
        that many chunks have count as words do. Any thread may call it.

        Args:
            terms: Of the question. The database stems and quotes them.
            allowed: Sorted rows that may be found; None: all.
            cancelled: Asked while the database searches, which it ends once this is True.

        Raises:
            Unavailable: It has taken longer than a second, or is cancelled.
        """


class EmbeddingTables(Protocol):
    """The vectors of chunks. Any thread reads."""

    def create(self, generation: int, dimension: int) -> None:
        """Create the table of a new generation."""

    def add(self, generation: int, rows: Sequence[int], vectors: Vectors) -> None:
        """Add the vectors of chunks."""

    def remove(self, generation: int, rows: Sequence[int]) -> None:
        """Remove the vectors of chunks. Some may have none."""

    def detach(self, generation: int) -> None:
        """Let no search use the vectors of a generation. Repeating it changes nothing."""

    def of_document(
        self, collection: str, document_id: str, generation: int
    ) -> list[tuple[Chunk, Vectors]]:
        """Return the chunks of a document with their embeddings, in order.

        Chunks without an embedding are left out.
        """

    def after(self, generation: int, after_row: int, limit: int) -> tuple[Rows, Vectors]:
        """Return embeddings of a generation after a row, sorted by row.

        Returns:
            Shapes (n,) and (n, dimension), n at most ``limit``.
        """

    def rows(self, generation: int) -> Rows:
        """Return the sorted rows of all chunks of a generation that have an embedding."""

    def of_rows(self, generation: int, rows: Sequence[int]) -> tuple[Rows, Vectors]:
        """Return the embeddings of rows, sorted by row. Rows that do not exist are left out."""
