"""Builds bases: assigns vectors to cells, and writes them in the order of the cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import faiss
import numpy as np
import numpy.typing as npt

from ragcache_core.retrieval.finality.cell_geometry import CellShapes, residual_alignment
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.search.cell_base import CellBase, empty_cell_base, opened_cell_base
from ragcache_retriever.search.files.base_files import BaseWriter
from ragcache_retriever.search.files.stored_vectors import (
    SAMPLE_VECTORS,
    Float32Vectors,
    Positions,
    Precision,
    Sq8Ranges,
    Sq8Vectors,
    StoredVectors,
    blocks,
)
from ragcache_retriever.search.hnsw_graph import HnswGraph
from ragcache_retriever.search.vector_index import Rows, Vectors

_TRAINING_VECTORS_PER_CELL: Final = 64
_TRAINING_ROUNDS: Final = 10
_ROUNDING: Final = 1e-6
_ALIGNMENT_VECTORS: Final = 64
"""Vectors of a cell from which the directions of its residuals are counted."""
_GRAPH_BLOCK: Final = 1 << 10
_BLOCK: Final = 1 << 14
"""Vectors that are assigned or copied at a time."""


class BuildAborted(Exception):
    """The index is being closed, so that its next base is not needed."""


class VectorSource(Protocol):
    """Vectors to build a base from."""

    def __len__(self) -> int:
        """Return the number of vectors."""

    @property
    def rows(self) -> Rows:
        """Row of each vector, without repeats."""

    def gather(self, indexes: Positions) -> Vectors:
        """Return vectors by their index in ``rows``."""


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What base to build.

    Attributes:
        kind: FLAT, IVF or HNSW, which has one cell and a graph.
        cells_of: Take its cells instead of training new ones, and its ranges of quantized values.
            Vectors that come from it then keep their codes.
        is_aborted: Asked between blocks of vectors.
    """

    kind: IndexKind
    precision: Precision = "float32"
    cells_of: CellBase | None = None
    is_aborted: Callable[[], bool] = lambda: False


def build_cell_base(
    source: VectorSource, dimension: int, options: BuildOptions, writer: BaseWriter | None = None
) -> CellBase:
    """Sort vectors into cells.

    Args:
        writer: Writes the base to files, so that its vectors need no memory. None: keep it in
            memory.

    Raises:
        BuildAborted: ``is_aborted`` told so.
    """
    if not len(source):
        return _finished(empty_cell_base(dimension), writer, ())
    before = options.cells_of
    centroids = _centroids(source, dimension, options.kind) if before is None else before.centroids
    cells = _assigned(source, centroids, options.is_aborted)
    by_cell = np.argsort(cells, kind="stable")
    block = _SortedBlock(centroids, cells, by_cell)
    vectors = _sorted_vectors(source, dimension, options, block, writer)
    rows = source.rows[by_cell]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(cells, minlength=len(centroids)))])
    base = CellBase(
        kind=options.kind,
        centroids=centroids,
        offsets=offsets,
        widths=block.widths,
        shapes=block.shapes(_alignments(vectors, centroids, offsets)),
        longest=block.longest,
        rows=rows,
        order=np.argsort(rows, kind="stable"),
        vectors=vectors,
        trained_for=len(source) if before is None else before.trained_for,
        graph=_graph(vectors, dimension, options) if options.kind is IndexKind.HNSW else None,
    )
    return _finished(base, writer, vectors.arrays())


def _finished(base: CellBase, writer: BaseWriter | None, written: Container[str]) -> CellBase:
    """Write what is not yet written of a base, and return the one in files."""
    if writer is None:
        return base
    for name, array in base.arrays().items():
        if name not in written:
            writer.put(name, array)
    return opened_cell_base(writer.finish(base.facts()))


def _graph(vectors: StoredVectors, dimension: int, options: BuildOptions) -> HnswGraph:
    def batches() -> Iterator[Vectors]:
        for begin, end in blocks(len(vectors), _GRAPH_BLOCK):
            if options.is_aborted():
                raise BuildAborted
            yield vectors.gather(np.arange(begin, end))

    return HnswGraph.build(batches(), dimension)


def _centroids(source: VectorSource, dimension: int, kind: IndexKind) -> Vectors:
    num_cells = max(1, math.isqrt(len(source))) if kind is IndexKind.IVF else 1
    if num_cells == 1:
        centre = source.gather(np.arange(min(len(source), _BLOCK))).mean(axis=0, keepdims=True)
        length = float(np.linalg.norm(centre))
        return np.asarray(centre / (length or 1.0), np.float32)
    training = faiss.Kmeans(
        dimension,
        num_cells,
        niter=_TRAINING_ROUNDS,
        spherical=True,
        min_points_per_centroid=1,
        max_points_per_centroid=_TRAINING_VECTORS_PER_CELL,
    )
    # Evenly spread, so that equal sources get equal cells.
    wanted = min(len(source), num_cells * _TRAINING_VECTORS_PER_CELL)
    sample = np.linspace(0, len(source) - 1, wanted).astype(np.int64)
    training.train(source.gather(sample))
    return np.asarray(training.centroids, np.float32)


def _assigned(
    source: VectorSource, centroids: Vectors, is_aborted: Callable[[], bool]
) -> Positions:
    """Return the nearest cell of each vector."""
    cells = np.empty(len(source), np.int64)
    for begin, end in blocks(len(source), _BLOCK):
        if is_aborted():
            raise BuildAborted
        scores = source.gather(np.arange(begin, end)) @ centroids.T
        cells[begin:end] = np.argmax(scores, axis=1)
    return cells


class _SortedBlock:
    """Measures cells, while their vectors are copied in their order."""

    def __init__(self, centroids: Vectors, cells: Positions, by_cell: Positions) -> None:
        self.by_cell = by_cell
        self.widths = np.zeros(len(centroids), np.float32)
        self.longest = 0.0
        self._sums = np.zeros((2, len(centroids)))  # of cosines, and of their squares
        self._centroids = centroids
        self._cells = cells[by_cell]

    def measure(self, begin: int, end: int, stored: Vectors) -> None:
        """Take the stored vectors of some positions."""
        cells = self._cells[begin:end]
        lengths = np.linalg.norm(stored, axis=1, keepdims=True)
        directions = stored / np.maximum(lengths, np.finfo(np.float32).tiny)
        # The distance of two points on the sphere is exact for small angles, their product is not.
        distances = np.linalg.norm(directions - self._centroids[cells], axis=1)
        angles = 2 * np.arcsin(np.minimum(distances / 2 + _ROUNDING, 1))
        np.maximum.at(self.widths, cells, angles.astype(np.float32))
        self.longest = max(self.longest, float(lengths.max()))
        cosines = np.cos(angles.astype(np.float64))
        for i, values in enumerate((cosines, cosines * cosines)):
            self._sums[i] += np.bincount(cells, weights=values, minlength=len(self._centroids))

    def shapes(self, alignments: Vectors) -> CellShapes:
        """Return how vectors lie in the cells, after all of them were measured."""
        sizes = np.bincount(self._cells, minlength=len(alignments))
        means, squares = self._sums / np.maximum(sizes, 1)
        variances = np.maximum(squares - means * means, 0)
        return CellShapes(sizes, means.astype(np.float32), variances.astype(np.float32), alignments)


def _alignments(vectors: StoredVectors, centroids: Vectors, offsets: Positions) -> Vectors:
    """Return the alignment of each cell's residuals, that of a typical cell if it is small."""
    found = [
        residual_alignment(
            vectors.gather(np.arange(first, min(last, first + _ALIGNMENT_VECTORS))), centroid
        )
        for centroid, first, last in zip(centroids, offsets[:-1], offsets[1:], strict=True)
    ]
    known = [one for one in found if one is not None]
    typical = float(np.median(known)) if known else 1.0
    return np.array([typical if one is None else one for one in found], np.float32)


def _sorted_vectors(
    source: VectorSource,
    dimension: int,
    options: BuildOptions,
    block: _SortedBlock,
    writer: BaseWriter | None,
) -> StoredVectors:
    shape = (len(source), dimension)
    ranges = _ranges(source, options)
    name, dtype = ("vectors", np.float32) if ranges is None else ("codes", np.uint8)
    target: npt.NDArray[Any] = (
        np.empty(shape, dtype) if writer is None else writer.allocate(name, shape, dtype)
    )
    if ranges is not None and writer is not None:
        writer.put("low", ranges.low)
        writer.put("step", ranges.step)
    result = Float32Vectors(target) if ranges is None else Sq8Vectors(target, ranges)
    for begin, end in blocks(len(source), _BLOCK):
        if options.is_aborted():
            raise BuildAborted
        vectors = source.gather(block.by_cell[begin:end])
        target[begin:end] = vectors if ranges is None else ranges.codes(vectors)
        block.measure(begin, end, result.gather(np.arange(begin, end)))
    return result


def _ranges(source: VectorSource, options: BuildOptions) -> Sq8Ranges | None:
    if options.precision == "float32":
        return None
    if options.cells_of is not None and isinstance(options.cells_of.vectors, Sq8Vectors):
        return options.cells_of.vectors.ranges
    sample = np.linspace(0, len(source) - 1, min(len(source), SAMPLE_VECTORS))
    return Sq8Ranges.of(source.gather(sample.astype(np.int64)))
