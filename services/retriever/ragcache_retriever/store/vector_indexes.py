"""The interface of the vector indexes of a store: one for each generation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.search.vector_index import Rows, VectorIndex, Vectors


class RowIndex(VectorIndex, Protocol):
    """A vector index that outlives its process, and tells what it holds."""

    @property
    def kind(self) -> IndexKind:
        """The kind in use, never AUTO."""

    @property
    def memory_bytes(self) -> int:
        """Memory that the index takes."""

    @property
    def is_building(self) -> bool:
        """Whether a better index of the same rows is being built in the background."""

    def rows(self) -> Rows:
        """Return the sorted rows that a search can find."""

    def load(self, batches: Iterable[tuple[Rows, Vectors]]) -> None:
        """Fill an index without rows from batches of rows and vectors. No other call may run.

        A graph, which takes long, is built in the background afterwards.
        """

    def set_kind(self, kind: IndexKind) -> None:
        """Change the kind, AUTO included. The index is built again in the background."""


class VectorIndexes(Protocol):
    """Opens and removes the indexes of generations."""

    def open(self, generation: int, dimension: int, kind: IndexKind) -> RowIndex:
        """Open the index of a generation. It is empty if there is none, or none that can be read.

        The caller compares its rows with those of the document store, and applies what differs.
        """

    def remove(self, generation: int) -> None:
        """Remove what is stored of a generation, whose index is closed."""

    def stored_generations(self) -> list[int]:
        """Return the generations that have stored files or tables."""
