"""The interfaces of vector indexes, which the knowledge base searches in stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ragcache_core.retrieval.index_kinds import IndexKind

Vectors = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class IndexStage:
    """The best hits so far.

    Attributes:
        rows: Best first; ties by row.
        scores: Inner product of each row with the query.
        progress: Finished share of the scan, in (0, 1].
        final: Whether this is the last stage.
        final_probability: That the last stage has the same rows in the same order, in [0, 1]: the
            share of past searches with such stages. It is 1 in the last stage.
        num_scored: Vectors that the query was compared with so far.
    """

    rows: tuple[int, ...]
    scores: tuple[float, ...]
    progress: float
    final: bool
    final_probability: float
    num_scored: int


class VectorIndex(Protocol):
    """Finds rows of one collection by vector.

    Searches may run on any number of threads, and during ``apply``. Each search sees one state: the
    one when it began.
    """

    def __len__(self) -> int:
        """Return the number of vectors."""

    def search(
        self,
        query: Vectors,
        top_k: int,
        *,
        allowed: Rows | None = None,
        recall: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[IndexStage]:
        """Yield the stages of a search: at least one, the last one final.

        Args:
            query: Shape (dimension,), of length 1.
            top_k: At least 1.
            allowed: Sorted rows that may be found; None: all.
            recall: Stop as soon as this share of the final hits is expected; None: finish.
            cancelled: Asked between units of work of about a millisecond. The search then ends
                without a final stage.
        """

    def apply(self, removed: Sequence[int], added: Sequence[int], vectors: Vectors) -> None:
        """Remove rows, ignoring unknown ones, then add rows with their vectors, as one change.

        It returns within milliseconds. One thread at a time calls it.

        Args:
            vectors: Shape (len(added), dimension), of length 1.
        """

    def close(self) -> None:
        """Wait for background work and release files. No search may run any more."""


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
