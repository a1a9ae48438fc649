"""Collects vectors for the first base of an index, in a file if the index has a folder."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from ragcache_retriever.search.files.stored_vectors import Positions
from ragcache_retriever.search.vector_index import Rows, Vectors


class Spool:
    """Vectors that come in batches. The file goes with the context.

    Args:
        folder: Of the index. None: keep the vectors in memory.
    """

    def __init__(self, folder: Path | None, dimension: int) -> None:
        self._dimension = dimension
        self._rows: list[Rows] = []
        self._vectors: list[Vectors] = []
        self._file = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  closed by __exit__

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, rows: Rows, vectors: Vectors) -> None:
        """Add vectors, shape (len(rows), dimension)."""
        self._rows.append(np.asarray(rows, np.int64))
        if self._file is None:
            self._vectors.append(vectors)
        else:
            self._file.write(np.ascontiguousarray(vectors, np.float32).tobytes())

    def source(self) -> SpooledSource:
        """Return what was added. It is valid within the context."""
        rows = np.concatenate([np.empty(0, np.int64), *self._rows])
        if self._file is None:
            nothing = np.empty((0, self._dimension), np.float32)
            return SpooledSource(rows, np.concatenate([nothing, *self._vectors]))
        self._file.flush()
        if not len(rows):
            return SpooledSource(rows, np.empty((0, self._dimension), np.float32))
        shape = (len(rows), self._dimension)
        return SpooledSource(rows, np.memmap(self._file, np.float32, "r", shape=shape))


class SpooledSource:
    """Vectors to build a base from, see VectorSource."""

    def __init__(self, rows: Rows, vectors: Vectors) -> None:
        self.rows = rows
        self._vectors = vectors

    def __len__(self) -> int:
        return len(self.rows)

    def gather(self, indexes: Positions) -> Vectors:
        """See VectorSource.gather."""
        return np.asarray(self._vectors[indexes])
