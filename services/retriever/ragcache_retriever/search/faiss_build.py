"""Builds faiss indexes of vectors by position."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import faiss
import numpy as np

from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.concurrency.cpu import usable_cores
from ragcache_retriever.search.faiss_base import FaissBase, Positions, Precision
from ragcache_retriever.search.vector_index import Rows, Vectors

FLAT_CELL: Final = 1 << 12
"""Vectors of a cell of a flat index."""
GRAPH_LINKS: Final = 32
GRAPH_BUILD_BEAM: Final = 80
TRAINING_VECTORS_PER_CELL: Final = 64
_faiss: Any = faiss  # its types leave out much of what Python can call
_TRAINING_ROUNDS: Final = 10
_RANGE_VECTORS: Final = 50_000
"""Vectors whose values set the ranges of quantized ones."""
_BLOCK: Final = 1 << 14
_GRAPH_BLOCK: Final = 1 << 10


class BuildAborted(Exception):
    """The index is being closed, so that its next base is not needed."""


@dataclass(frozen=True, slots=True)
class VectorSource:
    """Vectors to build a base from.

    Attributes:
        rows: Ascending.
        gather: Returns vectors by their indexes in ``rows``.
    """

    rows: Rows
    gather: Callable[[Positions], Vectors]

    def sample(self, count: int) -> Vectors:
        """Return evenly spread vectors, so that equal sources give equal ones."""
        last = len(self.rows) - 1
        return self.gather(np.linspace(0, last, min(count, last + 1)).astype(np.int64))


def empty_base(precision: Precision) -> FaissBase:
    """Return a base without vectors."""
    return FaissBase(IndexKind.FLAT, precision, None)


def build_base(
    source: VectorSource, kind: IndexKind, before: FaissBase, is_aborted: Callable[[], bool]
) -> FaissBase:
    """Build a base of the precision of another one.

    Quantized vectors that come from that base keep their codes while its ranges are used. An index
    that has doubled gets ranges of its own, because a few vectors tell little about many.

    Args:
        kind: FLAT, IVF or HNSW.
        is_aborted: Asked between blocks of vectors.

    Raises:
        BuildAborted: ``is_aborted`` told so.
    """
    if not len(source.rows):
        return empty_base(before.precision)
    faiss.omp_set_num_threads(usable_cores())  # of this thread only
    index = _trained(source, kind, before.precision)
    if before.precision == "sq8" and _has_lasting_ranges(before, len(source.rows)):
        _quantizer(index).trained = _quantizer(before.index).trained
    block_size = _GRAPH_BLOCK if kind is IndexKind.HNSW else _BLOCK
    for positions in _blocks(len(source.rows), block_size):
        if is_aborted():
            raise BuildAborted
        _add(index, kind, positions, np.ascontiguousarray(source.gather(positions), np.float32))
    with_rows = faiss.IndexIDMap(faiss.IndexFlatIP(index.d))
    with_rows.index = index  # Python does not own it any more
    with_rows.own_fields = True
    faiss.copy_array_to_vector(source.rows, with_rows.id_map)
    with_rows.ntotal = len(source.rows)
    return FaissBase(kind, before.precision, with_rows)


def _has_lasting_ranges(before: FaissBase, num_vectors: int) -> bool:
    """Whether the quantizer of a base fits a number of vectors that contain its own."""
    return len(before) >= _RANGE_VECTORS or num_vectors < 2 * len(before)


def _trained(source: VectorSource, kind: IndexKind, precision: Precision) -> Any:
    """Return an index without vectors that knows its cells and ranges."""
    count = len(source.rows)
    num_sampled = _RANGE_VECTORS if precision == "sq8" else 1
    if kind is IndexKind.HNSW:
        sample = source.sample(num_sampled)
        arguments = (GRAPH_LINKS, faiss.METRIC_INNER_PRODUCT)
        index: Any = (
            faiss.IndexHNSWFlat(sample.shape[1], *arguments)
            if precision == "float32"
            else _faiss.IndexHNSWSQ(sample.shape[1], faiss.ScalarQuantizer.QT_8bit, *arguments)
        )
        index.hnsw.efConstruction = GRAPH_BUILD_BEAM
    else:
        is_flat = kind is IndexKind.FLAT
        num_cells = math.ceil(count / FLAT_CELL) if is_flat else max(1, math.isqrt(count))
        if not is_flat:
            num_sampled = max(num_sampled, TRAINING_VECTORS_PER_CELL * num_cells)
        sample = source.sample(num_sampled)
        index = _cells(sample.shape[1], num_cells, precision)
        if is_flat:  # its cells need no centroids, but faiss wants some
            index.quantizer.add(np.zeros((num_cells, sample.shape[1]), np.float32))
    index.train(np.ascontiguousarray(sample, np.float32))
    return index


def _cells(dimension: int, num_cells: int, precision: Precision) -> Any:
    quantizer = _faiss.IndexFlatIP(dimension)
    index: Any
    if precision == "float32":
        index = faiss.IndexIVFFlat(quantizer, dimension, num_cells, faiss.METRIC_INNER_PRODUCT)
    else:
        index = faiss.IndexIVFScalarQuantizer(
            quantizer,
            dimension,
            num_cells,
            faiss.ScalarQuantizer.QT_8bit,
            faiss.METRIC_INNER_PRODUCT,
            False,
        )
    quantizer.this.disown()
    index.own_fields = True
    index.cp.niter = _TRAINING_ROUNDS
    index.cp.min_points_per_centroid = 1
    index.cp.max_points_per_centroid = TRAINING_VECTORS_PER_CELL
    index.set_direct_map_type(_faiss.DirectMap.Array)
    return index


def _quantizer(index: Any) -> Any:
    return index.sq if hasattr(index, "sq") else _faiss.downcast_index(index.storage).sq


def _add(index: Any, kind: IndexKind, positions: Positions, vectors: Vectors) -> None:
    if kind is IndexKind.HNSW:
        index.add(vectors)
        return
    if kind is IndexKind.FLAT:
        cells = positions // FLAT_CELL
    else:
        cells = index.quantizer.search(vectors, 1)[1][:, 0]
    cells = np.ascontiguousarray(cells, np.int64)
    index.add_core(len(vectors), faiss.swig_ptr(vectors), None, faiss.swig_ptr(cells))


def _blocks(count: int, size: int) -> Iterator[Positions]:
    for begin in range(0, count, size):
        yield np.arange(begin, min(begin + size, count))
