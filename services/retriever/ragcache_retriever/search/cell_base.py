"""An immutable base of vectors that are sorted by cell: IVF, or one cell for a flat scan.

The vectors of a cell are contiguous, so that scanning a cell is one matrix product, and several
queries share it. Any thread scans any cell; there is no state that a search would change.

Source: RAGCache section 5.3, staged IVF search.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import faiss
import numpy as np
import numpy.typing as npt

from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.search.files.base_files import BaseWriter, OpenedBase
from ragcache_retriever.search.files.stored_vectors import (
    SAMPLE_VECTORS,
    Float32Vectors,
    Positions,
    Precision,
    Sq8Ranges,
    Sq8Vectors,
    StoredVectors,
    blocks,
    from_arrays,
)
from ragcache_retriever.search.vector_index import Rows, Vectors

_TRAINING_VECTORS_PER_CELL: Final = 64
_TRAINING_ROUNDS: Final = 10
_BOUND_SLACK: Final = 1e-5
"""Added to bounds, because scores are rounded."""
_BLOCK: Final = 1 << 14
"""Vectors that are assigned or copied at a time."""


@dataclass(frozen=True, slots=True)
class Probing:
    """How much of a large collection a search scans: the nearest cells.

    They hold at least ``exact_limit`` vectors and ``min_share`` of all. A collection of up to
    ``exact_limit`` vectors is therefore scanned completely.
    """

    exact_limit: int = 20_000
    min_share: float = 1 / 16


@dataclass(frozen=True, slots=True)
class CellPlan:
    """The cells that a search scans, nearest first.

    Attributes:
        cells: Numbers of cells that are not empty.
        scanned: Vectors after each cell, ascending.
        centroid_scores: Inner product of the query and the centroid of each cell.
        bounds: The highest score that a vector in this cell or a later one can have.
    """

    cells: npt.NDArray[np.int64]
    scanned: npt.NDArray[np.int64]
    centroid_scores: npt.NDArray[np.float32]
    bounds: npt.NDArray[np.float32]

    @property
    def total(self) -> int:
        """Vectors in all of these cells."""
        return int(self.scanned[-1]) if len(self.scanned) else 0


class VectorSource(Protocol):
    """Vectors to build a base from."""

    def __len__(self) -> int:
        """Return the number of vectors."""

    @property
    def rows(self) -> Rows:
        """Row of each vector, without repeats."""

    def gather(self, indexes: Positions) -> Vectors:
        """Return vectors by their index in ``rows``."""


class CellBase:
    """Vectors by position, sorted by cell.

    Args:
        centroids: Shape (cells, dimension), of length 1.
        offsets: First position of each cell, and the number of vectors; shape (cells + 1,).
        widths: Largest angle between a centroid and a vector of its cell, in radians.
        rows: Row of each position.
        order: Positions, sorted by their rows.
        trained_for: Number of vectors when the centroids were trained.
    """

    def __init__(
        self,
        kind: IndexKind,
        centroids: Vectors,
        offsets: Positions,
        widths: Vectors,
        rows: Rows,
        order: Positions,
        vectors: StoredVectors,
        trained_for: int,
    ) -> None:
        self.kind = kind
        self.rows = rows
        self.vectors = vectors
        self.trained_for = trained_for
        self.centroids = centroids
        self.offsets = offsets
        self._widths = widths
        self._order = order
        self._sorted_rows = rows[order]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def sorted_rows(self) -> Rows:
        """All rows, sorted."""
        return self._sorted_rows

    @property
    def memory_bytes(self) -> int:
        """Bytes of this base, in memory or mapped."""
        return sum(array.nbytes for array in self._arrays().values())

    def positions_of(self, rows: Rows) -> Positions:
        """Return the positions of rows. Rows that this base does not have are left out."""
        if not len(self._sorted_rows):
            return np.empty(0, np.int64)
        found = np.searchsorted(self._sorted_rows, rows)
        found = np.minimum(found, len(self._sorted_rows) - 1)
        return np.asarray(self._order[found[self._sorted_rows[found] == rows]], np.int64)

    def plan(self, query: Vectors, probing: Probing) -> CellPlan:
        """Choose the cells to scan for a query of shape (dimension,)."""
        scores = self.centroids @ query
        ranked = np.lexsort((np.arange(len(scores)), -scores))
        sizes = np.diff(self.offsets)[ranked]
        ranked, sizes = ranked[sizes > 0], sizes[sizes > 0]
        limit = max(probing.exact_limit, math.ceil(probing.min_share * len(self)))
        scanned = np.cumsum(sizes)
        enough = int(np.searchsorted(scanned, limit)) + 1
        cells = ranked[:enough]
        # No vector is nearer to the query than the edge of its cell (triangle inequality of angles).
        angles = np.arccos(np.clip(scores[cells], -1, 1)) - self._widths[cells]
        bounds = (np.cos(np.maximum(angles, 0)) + _BOUND_SLACK).astype(np.float32)
        highest = np.maximum.accumulate(bounds[::-1])[::-1]
        return CellPlan(cells, scanned[:enough], scores[cells], highest)

    def assign(self, vectors: Vectors) -> Positions:
        """Return the nearest cell of each vector."""
        return np.argmax(vectors @ self.centroids.T, axis=1)

    def write(self, writer: BaseWriter) -> CellBase:
        """Write a base that is in memory, and return the same one in files."""
        for name, array in self._arrays().items():
            writer.put(name, array)
        return opened_cell_base(writer.finish(self._facts()))

    def _facts(self) -> Mapping[str, Any]:
        return {"kind": self.kind, "trained_for": self.trained_for}

    def _arrays(self) -> Mapping[str, npt.NDArray[Any]]:
        return {
            "centroids": self.centroids,
            "offsets": self.offsets,
            "widths": self._widths,
            "rows": self.rows,
            "order": self._order,
            **self.vectors.arrays(),
        }


def opened_cell_base(opened: OpenedBase) -> CellBase:
    """Return the base of mapped files. Raises KeyError if arrays are missing."""
    arrays = opened.arrays
    return CellBase(
        IndexKind(opened.facts["kind"]),
        np.asarray(arrays["centroids"]),
        np.asarray(arrays["offsets"]),
        np.asarray(arrays["widths"]),
        np.asarray(arrays["rows"]),
        np.asarray(arrays["order"]),
        from_arrays(arrays),
        int(opened.facts["trained_for"]),
    )


def empty_cell_base(dimension: int) -> CellBase:
    """Return a base without vectors."""
    nothing = np.empty((0, dimension), np.float32)
    none = np.empty(0, np.int64)
    return CellBase(
        IndexKind.FLAT,
        nothing,
        np.zeros(1, np.int64),
        np.empty(0, np.float32),
        none,
        none,
        Float32Vectors(nothing),
        0,
    )


def build_cell_base(
    source: VectorSource,
    dimension: int,
    kind: IndexKind,
    precision: Precision,
    *,
    cells_of: CellBase | None = None,
    writer: BaseWriter | None = None,
) -> CellBase:
    """Sort vectors into cells.

    Args:
        kind: FLAT or IVF.
        cells_of: Take its cells instead of training new ones.
        writer: Writes the base to files, so that its vectors need no memory. None: keep it in
            memory.
    """
    centroids = _centroids(source, dimension, kind) if cells_of is None else cells_of.centroids
    cells, angles = _assigned(source, centroids)
    by_cell = np.argsort(cells, kind="stable")
    counts = np.bincount(cells, minlength=len(centroids))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    widths = np.zeros(len(centroids), np.float32)
    np.maximum.at(widths, cells, angles)
    rows = source.rows[by_cell]
    vectors = _sorted_vectors(source, by_cell, dimension, precision, writer)
    base = CellBase(
        kind,
        centroids,
        offsets,
        widths,
        rows,
        np.argsort(rows, kind="stable"),
        vectors,
        len(source) if cells_of is None else cells_of.trained_for,
    )
    if writer is None:
        return base
    for name, array in base._arrays().items():
        if name not in vectors.arrays():
            writer.put(name, array)
    return opened_cell_base(writer.finish(base._facts()))


def _centroids(source: VectorSource, dimension: int, kind: IndexKind) -> Vectors:
    num_cells = max(1, math.isqrt(len(source))) if kind is IndexKind.IVF else 1
    if num_cells == 1:
        centre = source.gather(np.arange(min(len(source), _BLOCK))).mean(axis=0, keepdims=True)
        length = float(np.linalg.norm(centre))
        return (centre / (length or 1.0)).astype(np.float32)
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


def _assigned(source: VectorSource, centroids: Vectors) -> tuple[Positions, Vectors]:
    """Return the nearest cell of each vector, and the angle to its centroid."""
    cells = np.empty(len(source), np.int64)
    angles = np.empty(len(source), np.float32)
    for begin, end in blocks(len(source), _BLOCK):
        scores = source.gather(np.arange(begin, end)) @ centroids.T
        cells[begin:end] = np.argmax(scores, axis=1)
        angles[begin:end] = np.arccos(np.clip(scores.max(axis=1), -1, 1))
    return cells, angles


def _sorted_vectors(
    source: VectorSource,
    by_cell: Positions,
    dimension: int,
    precision: Precision,
    writer: BaseWriter | None,
) -> StoredVectors:
    shape = (len(source), dimension)
    if precision == "float32":
        name, dtype, ranges = "vectors", np.dtype(np.float32), None
    else:
        sample = np.linspace(0, len(source) - 1, min(len(source), SAMPLE_VECTORS))
        name, dtype = "codes", np.dtype(np.uint8)
        ranges = Sq8Ranges(source.gather(sample.astype(np.int64)))
    target = np.empty(shape, dtype) if writer is None else writer.allocate(name, shape, dtype)
    for begin, end in blocks(len(source), _BLOCK):
        vectors = source.gather(by_cell[begin:end])
        target[begin:end] = vectors if ranges is None else ranges.codes(vectors)
    if ranges is None:
        return Float32Vectors(target)
    if writer is not None:
        writer.put("low", ranges.low)
        writer.put("step", ranges.step)
    return Sq8Vectors(target, ranges.low, ranges.step)
