"""Vector indexes in memory, which are built from the document store at each start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.concurrency.read_write_lock import ReadWriteLock
from ragcache_retriever.search.index import Probing, StagedIndex
from ragcache_retriever.search.vector_index import IndexStage, Rows, Vectors


class MemoryIndex:
    """A StagedIndex whose changes wait for searches. See RowIndex."""

    def __init__(self, dimension: int, probing: Probing) -> None:
        no_rows, no_vectors = np.empty(0, np.int64), np.empty((0, dimension), np.float32)
        self._index = StagedIndex(dimension, no_rows, no_vectors, probing)
        self._rows: set[int] = set()
        self._dimension = dimension
        self._lock = ReadWriteLock()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def kind(self) -> IndexKind:
        """The kind in use."""
        return IndexKind.IVF

    @property
    def memory_bytes(self) -> int:
        """Memory that the vectors take."""
        return 4 * self._dimension * len(self)

    @property
    def is_building(self) -> bool:
        """Whether a better index is being built."""
        return False

    def rows(self) -> Rows:
        """Return the sorted rows."""
        return np.array(sorted(self._rows), np.int64)

    def set_kind(self, kind: IndexKind) -> None:
        """Do nothing: there is one kind."""

    def search(
        self,
        query: Vectors,
        top_k: int,
        *,
        allowed: Rows | None = None,
        recall: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[IndexStage]:
        """Yield the stages of a search. See VectorIndex."""
        wanted = top_k if allowed is None else max(top_k, len(self))
        with self._lock.reading():
            stages = [] if not wanted else list(self._index.search(query, wanted))
        for stage in stages:
            if cancelled is not None and cancelled():
                return
            hits = [
                (row, score)
                for row, score in zip(stage.rows, stage.scores, strict=True)
                if allowed is None or row in allowed
            ][:top_k]
            yield IndexStage(
                rows=tuple(row for row, _ in hits),
                scores=tuple(score for _, score in hits),
                progress=stage.progress,
                final=stage.final,
                final_probability=1.0 if stage.final else 0.0,
                num_scored=0,
            )

    def apply(self, removed: Sequence[int], added: Sequence[int], vectors: Vectors) -> None:
        """Remove rows, then add rows."""
        self._rows = self._rows.difference(removed).union(added)
        with self._lock.writing():
            self._index.replace(removed, added, vectors)
            if self._index.outgrown:
                self._index = self._index.retrained()

    def close(self) -> None:
        """Do nothing: there are no files."""


class MemoryIndexes:
    """Makes indexes in memory. See VectorIndexes."""

    def __init__(self, probing: Probing | None = None) -> None:
        self._probing = probing or Probing()

    def open(self, generation: int, dimension: int, kind: IndexKind) -> MemoryIndex:
        """Return an empty index."""
        return MemoryIndex(dimension, self._probing)

    def remove(self, generation: int) -> None:
        """Do nothing: nothing is stored."""

    def stored_generations(self) -> list[int]:
        """Return none."""
        return []
