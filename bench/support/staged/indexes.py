"""Indexes for measurements, and estimators that record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.search.cell_base import CellBase, Probing
from ragcache_retriever.search.cell_build import BuildOptions, build_cell_base
from ragcache_retriever.search.files.stored_vectors import Precision
from ragcache_retriever.search.index_view import IndexView, Tail
from ragcache_retriever.search.scan_pool import IndexThreads
from ragcache_retriever.search.segmented_index import IndexOptions, SegmentedIndex

Vectors = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int64]

_BATCH = 1 << 14


class InMemory:
    """Vectors to build a base from. The row of each is its index."""

    def __init__(self, vectors: Vectors) -> None:
        self._vectors = vectors
        self.rows = np.arange(len(vectors))

    def __len__(self) -> int:
        return len(self.rows)

    def gather(self, indexes: Positions) -> Vectors:
        """Return vectors by their index."""
        return self._vectors[indexes]


def build(
    vectors: Vectors, precision: Precision = "float32", cells_of: CellBase | None = None
) -> CellBase:
    """Return a base of cells in memory, the same cells as another one if it is given."""
    options = BuildOptions(IndexKind.IVF, precision, cells_of)
    return build_cell_base(InMemory(vectors), vectors.shape[1], options)


def opened_base(base: CellBase) -> IndexView:
    """Return a view of a base to search in."""
    return IndexView(base, None, Tail.empty(base.centroids.shape[1]))


@contextmanager
def opened_index(
    vectors: Vectors, probing: Probing, folder: Path | None = None, precision: Precision = "float32"
) -> Iterator[SegmentedIndex]:
    """An index with the vectors in cells, and one thread that scans."""
    threads = IndexThreads.start(1)
    options = IndexOptions(IndexKind.IVF, precision, None, probing)
    index = SegmentedIndex.open(folder, vectors.shape[1], options, threads)
    index.load(
        (np.arange(begin, min(begin + _BATCH, len(vectors))), vectors[begin : begin + _BATCH])
        for begin in range(0, len(vectors), _BATCH)
    )
    try:
        yield index
    finally:
        index.close()
        threads.close()
