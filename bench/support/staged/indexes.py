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
from ragcache_retriever.search.faiss_index import BuildThread, FaissIndex, IndexOptions

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
    """An index over a base, which has counted no search yet."""
    options = IndexOptions(base.kind, base.precision, None, effort)
    with BuildThread() as builds:
        index = FaissIndex(None, base.index.d, options, builds, base)
        yield index
        index.close()


@contextmanager
def opened_index(vectors: Vectors, effort: SearchEffort, folder: Path) -> Iterator[FaissIndex]:
    """An index of a folder, filled with the vectors in cells if it is empty."""
    options = IndexOptions(IndexKind.IVF, effort=effort)
    with BuildThread() as builds:
        index = FaissIndex.open(folder, vectors.shape[1], options, builds)
        if not len(index):
            index.load(
                (np.arange(begin, begin + len(batch)), batch)
                for begin in range(0, len(vectors), _BATCH)
                for batch in [vectors[begin : begin + _BATCH]]
            )
        yield index
        index.close()
