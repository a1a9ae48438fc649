"""An immutable base of vectors that are sorted by cell: IVF, or one cell for a flat scan.

The vectors of a cell are contiguous, so that scanning a cell is one matrix product, and several
queries share it. Any thread scans any cell; there is no state that a search would change.

Source: RAGCache section 5.3, staged IVF search.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ragcache_core.retrieval.finality.cell_geometry import CellShapes
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.search.files.base_files import DamagedIndex, OpenedBase
from ragcache_retriever.search.files.stored_vectors import (
    Float32Vectors,
    Positions,
    StoredVectors,
    from_arrays,
)
from ragcache_retriever.search.hnsw_graph import HnswGraph
from ragcache_retriever.search.vector_index import Rows, Vectors

_ROUNDING: Final = 1e-6
"""Inner products of vectors of length 1 are rounded by less."""
_BOUND_SLACK: Final = 1e-5
"""Added to bounds, because scores are rounded."""


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
        shapes: How vectors lie in the cells.
    """

    cells: npt.NDArray[np.int64]
    scanned: npt.NDArray[np.int64]
    centroid_scores: npt.NDArray[np.float32]
    bounds: npt.NDArray[np.float32]
    shapes: CellShapes

    @property
    def total(self) -> int:
        """Vectors in all of these cells."""
        return int(self.scanned[-1]) if len(self.scanned) else 0


class CellBase:
    """Vectors by position, sorted by cell.

    Args:
        centroids: Shape (cells, dimension), of length 1.
        offsets: First position of each cell, and the number of vectors; shape (cells + 1,).
        widths: Largest angle between a centroid and a vector of its cell, in radians.
        shapes: How vectors lie in the cells.
        longest: Largest length of a stored vector. Quantized ones differ from 1.
        rows: Row of each position.
        order: Positions, sorted by their rows.
        trained_for: Number of vectors when the centroids were trained.
        graph: Links between the positions, if the kind is HNSW.
    """

    def __init__(
        self,
        kind: IndexKind,
        centroids: Vectors,
        offsets: Positions,
        widths: Vectors,
        shapes: CellShapes,
        longest: float,
        rows: Rows,
        order: Positions,
        vectors: StoredVectors,
        trained_for: int,
        graph: HnswGraph | None = None,
    ) -> None:
        self.kind = kind
        self.rows = rows
        self.vectors = vectors
        self.trained_for = trained_for
        self.graph = graph
        self.centroids = centroids
        self.offsets = offsets
        self.longest = longest
        self.shapes = shapes
        self._widths = widths
        self._order = order
        self._sizes = np.diff(offsets)
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
        return sum(array.nbytes for array in self.arrays().values())

    def positions_of(self, rows: Rows) -> Positions:
        """Return the positions of rows. Rows that this base does not have are left out."""
        if not len(self._sorted_rows):
            return np.empty(0, np.int64)
        found = np.searchsorted(self._sorted_rows, rows)
        found = np.minimum(found, len(self._sorted_rows) - 1)
        return np.asarray(self._order[found[self._sorted_rows[found] == rows]], np.int64)

    def plan(
        self, query: Vectors, probing: Probing, num_allowed: Positions | None = None
    ) -> CellPlan:
        """Choose the cells to scan for a query of shape (dimension,).

        Args:
            num_allowed: Vectors of each cell that may be found, shape (cells,). Cells without one
                are left out, and the plan also holds ``min_share`` of them. None: all may be found.
        """
        scores = self.centroids @ query
        ranked = np.argsort(-scores, kind="stable")
        usable = self._sizes if num_allowed is None else num_allowed
        ranked = ranked[usable[ranked] > 0]
        scanned = np.cumsum(self._sizes[ranked])
        limit = max(probing.exact_limit, math.ceil(probing.min_share * len(self)))
        enough = int(np.searchsorted(scanned, limit)) + 1
        if num_allowed is not None:
            found = np.cumsum(num_allowed[ranked])
            wanted = math.ceil(probing.min_share * num_allowed.sum())
            enough = max(enough, int(np.searchsorted(found, wanted)) + 1)
        cells = ranked[:enough]
        bounds = self._bounds(cells, scores[cells])
        highest = np.maximum.accumulate(bounds[::-1])[::-1]
        shapes = self.shapes.of(cells)
        return CellPlan(cells, scanned[:enough], scores[cells], highest, shapes)

    def num_in_cells(self, mask: npt.NDArray[np.bool_]) -> Positions:
        """Return how many positions of each cell are True in a mask of shape (len(self),)."""
        counts = np.zeros(len(self._sizes), np.int64)
        filled = np.flatnonzero(self._sizes)
        if len(filled):
            counts[filled] = np.add.reduceat(mask, self.offsets[filled], dtype=np.int64)
        return counts

    def _bounds(self, cells: Positions, centroid_scores: Vectors) -> Vectors:
        """Return the highest score that a vector of each cell can have.

        No vector is nearer to the query than the edge of its cell (triangle inequality of angles).
        """
        angles = np.arccos(np.clip(centroid_scores + _ROUNDING, -1, 1)) - self._widths[cells]
        cosines = np.cos(np.maximum(angles, 0))
        bounds = np.maximum(cosines, 0) * self.longest + _BOUND_SLACK
        return np.asarray(bounds, np.float32)

    def facts(self) -> Mapping[str, Any]:
        """Return what to write to the manifest."""
        return {"kind": self.kind, "trained_for": self.trained_for, "longest": self.longest}

    def arrays(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return what to write to files, by name."""
        return {
            "centroids": self.centroids,
            "offsets": self.offsets,
            "widths": self._widths,
            "mean_cosines": self.shapes.mean_cosines,
            "cosine_variances": self.shapes.cosine_variances,
            "alignments": self.shapes.alignments,
            "rows": self.rows,
            "order": self._order,
            **self.vectors.arrays(),
            **({} if self.graph is None else self.graph.arrays()),
        }


def opened_cell_base(opened: OpenedBase) -> CellBase:
    """Return the base of mapped files.

    Raises:
        DamagedIndex: They are no base of cells, or do not fit each other.
    """
    arrays, facts = opened.arrays, opened.facts
    try:
        base = CellBase(
            IndexKind(facts["kind"]),
            arrays["centroids"],
            arrays["offsets"],
            arrays["widths"],
            CellShapes(
                np.diff(arrays["offsets"]),
                arrays["mean_cosines"],
                arrays["cosine_variances"],
                arrays["alignments"],
            ),
            float(facts["longest"]),
            arrays["rows"],
            arrays["order"],
            from_arrays(arrays),
            int(facts["trained_for"]),
            HnswGraph.from_arrays(arrays) if facts["kind"] == IndexKind.HNSW else None,
        )
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise DamagedIndex(f"{opened.folder} is no base of cells: {error!r}") from error
    sizes = {len(base), len(base.vectors), int(base.offsets[-1]), len(base.sorted_rows)}
    if base.graph is not None:
        sizes.add(len(base.graph))
    if len(sizes) > 1 or len(base.centroids) + 1 != len(base.offsets):
        raise DamagedIndex(f"the arrays of {opened.folder} do not fit each other")
    return base


def empty_cell_base(dimension: int) -> CellBase:
    """Return a base without vectors."""
    nothing = np.empty((0, dimension), np.float32)
    none = np.empty(0, np.int64)
    no_cells = np.empty(0, np.float32)
    return CellBase(
        kind=IndexKind.FLAT,
        centroids=nothing,
        offsets=np.zeros(1, np.int64),
        widths=no_cells,
        shapes=CellShapes(none, no_cells, no_cells, no_cells),
        longest=1.0,
        rows=none,
        order=none,
        vectors=Float32Vectors(nothing),
        trained_for=0,
    )
