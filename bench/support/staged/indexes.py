"""Indexes for measurements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.search.faiss_base import FaissBase, Precision, SearchEffort
from ragcache_retriever.search.faiss_build import VectorSource, build_base, empty_base
from ragcache_retriever.search.faiss_index import FaissIndex, IndexOptions, IndexThreads

Vectors = npt.NDArray[np.float32]

_BATCH = 1 << 14


def build(
    vectors: Vectors, kind: IndexKind = IndexKind.IVF, precision: Precision = "float32"
) -> FaissBase:
    """Return a base in memory. The row of each vector is its index."""
    source = VectorSource(np.arange(len(vectors)), lambda indexes: vectors[indexes])
    return build_base(source, kind, empty_base(precision), lambda: False)


@contextmanager
def searched(base: FaissBase, effort: SearchEffort) -> Iterator[FaissIndex]:
    """An index over a base, which has learned nothing yet. It scans for one search at a time."""
    threads = IndexThreads.start(1)
    options = IndexOptions(base.kind, base.precision, None, effort)
    index = FaissIndex(None, base.index.d, options, threads, base)
    try:
        yield index
    finally:
        index.close()
        threads.close()


@contextmanager
def opened_index(vectors: Vectors, effort: SearchEffort, folder: Path) -> Iterator[FaissIndex]:
    """An index of a folder, filled with the vectors in cells if it is empty."""
    threads = IndexThreads.start(1)
    options = IndexOptions(IndexKind.IVF, effort=effort)
    index = FaissIndex.open(folder, vectors.shape[1], options, threads)
    if not len(index):
        index.load(
            (np.arange(begin, min(begin + _BATCH, len(vectors))), vectors[begin : begin + _BATCH])
            for begin in range(0, len(vectors), _BATCH)
        )
    try:
        yield index
    finally:
        index.close()
        threads.close()
