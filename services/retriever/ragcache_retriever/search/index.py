"""Staged vector search, which scans the cells nearest to the query first.

The index partitions vectors into about sqrt(n) cells (faiss IVF). A search ranks the cells by their
centroids and scans them in stages. Each stage returns the best hits so far, so that an answer can
begin while the search runs.

A search scans the nearest cells until they hold at least ``exact_limit`` vectors and ``min_share``
of all. It therefore scans a collection of up to ``exact_limit`` vectors completely, and the final
stage is exact.

Source: RAGCache section 5.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]

STAGE_SHARES = (1 / 8, 1 / 2, 1.0)
"""Share of the scan at the end of each stage. After 13 % of the scan, 95 % of searches have their
final hits (RAGCache Fig. 8)."""

_GROWTH = 4
"""An index is retrained at this many times the vectors that it was trained for. Its cells then have
twice their intended size."""
_TRAINING_VECTORS_PER_CELL = 64
_TRAINING_ROUNDS = 10
_SPARE_HITS = 8


@dataclass(frozen=True, slots=True)
class Probing:
    """How much of a large collection a search scans. See the module."""

    exact_limit: int = 20_000
    min_share: float = 1 / 16


@dataclass(frozen=True, slots=True)
class IndexStage:
    """The best hits so far: rows and their scores (inner products), best first, ties by row.

    ``progress`` is the finished share of the scan, in (0, 1].
    """

    rows: tuple[int, ...]
    scores: tuple[float, ...]
    progress: float
    final: bool


class StagedIndex:
    """Finds rows by vector. Searches may run concurrently, but not during ``replace``."""

    def __init__(self, dimension: int, rows: Rows, vectors: Vectors, probing: Probing) -> None:
        """Train the index.

        Args:
            rows: Shape (n,), without repeats.
            vectors: Shape (n, dimension), of length 1.
        """
        self._dimension = dimension
        self._probing = probing
        self._trained_for = len(rows)
        self._ivf = _trained(dimension, vectors)
        if len(rows):
            self._ivf.add_with_ids(vectors, rows)

    def __len__(self) -> int:
        return int(self._ivf.ntotal)

    @property
    def outgrown(self) -> bool:
        """Whether the index has grown so much since its training that it has too few cells."""
        return len(self) >= _GROWTH * max(1, self._trained_for)

    def retrained(self) -> StagedIndex:
        """Return a new index with the same vectors in new cells. Searches may run meanwhile."""
        rows, vectors = self._contents()
        return StagedIndex(self._dimension, rows, vectors, self._probing)

    def replace(self, removed: Sequence[int], added: Sequence[int], vectors: Vectors) -> None:
        """Remove rows, ignoring unknown ones, then add rows with their vectors."""
        if removed:
            self._ivf.remove_ids(np.array(removed, np.int64))
        if added:
            self._ivf.add_with_ids(vectors, np.array(added, np.int64))

    def search(self, query: Vectors, top_k: int) -> Iterator[IndexStage]:
        """Yield the stages of a search: at least one that is not final, then the final one.

        Args:
            query: Shape (dimension,), of length 1.
            top_k: At least 1.
        """
        cells, sizes = self._cells(query)
        scanned = np.cumsum(sizes)
        ends = stage_ends(scanned)
        total = int(scanned[-1]) if len(scanned) else 0
        found: dict[int, float] = {}
        start = 0
        for i, end in enumerate(ends):
            found |= self._scan(query, cells[start:end], top_k)
            start = end
            best = sorted(found.items(), key=lambda hit: (-hit[1], hit[0]))[:top_k]
            found = dict(best)
            yield IndexStage(
                rows=tuple(row for row, _ in best),
                scores=tuple(score for _, score in best),
                progress=int(scanned[end - 1]) / total if total else 1.0,
                final=i == len(ends) - 1,
            )

    def _cells(self, query: Vectors) -> tuple[Rows, Rows]:
        """Return the non-empty cells to scan, nearest first, and the number of vectors in each."""
        ranked = self._ivf.quantizer.search(query[np.newaxis], self._ivf.nlist)[1][0]
        sizes = np.array([self._ivf.invlists.list_size(int(cell)) for cell in ranked], np.int64)
        ranked, sizes = ranked[sizes > 0], sizes[sizes > 0]
        limit = max(self._probing.exact_limit, math.ceil(self._probing.min_share * len(self)))
        enough = int(np.searchsorted(np.cumsum(sizes), limit)) + 1
        return ranked[:enough], sizes[:enough]

    def _scan(self, query: Vectors, cells: Rows, top_k: int) -> dict[int, float]:
        """Return the best top_k rows of cells with their scores, and all that tie with the last."""
        # faiss skips cells of -1. Their number is fixed, because nprobe belongs to the whole index.
        probed = np.full((1, self._ivf.nprobe), -1, np.int64)
        probed[0, : len(cells)] = cells
        wanted = top_k + _SPARE_HITS
        while True:
            scores, rows = self._ivf.search_preassigned(query[np.newaxis], wanted, probed, None)
            found = rows[0] >= 0
            # Among equal scores faiss keeps those that it met first. All ties of the last wanted
            # row are known only once faiss returns a worse one.
            if not found.all() or scores[0, -1] < scores[0, top_k - 1]:
                return dict(zip(rows[0][found].tolist(), scores[0][found].tolist(), strict=True))
            wanted = min(2 * wanted, len(self) + 1)

    def _contents(self) -> tuple[Rows, Vectors]:
        rows, vectors = [], []
        lists = self._ivf.invlists
        for cell in range(self._ivf.nlist):
            size = lists.list_size(cell)
            if size:
                rows.append(faiss.rev_swig_ptr(lists.get_ids(cell), size).copy())
                codes = faiss.rev_swig_ptr(lists.get_codes(cell), size * self._ivf.code_size)
                vectors.append(codes.copy().view(np.float32).reshape(size, -1))
        if not rows:
            return np.empty(0, np.int64), np.empty((0, self._dimension), np.float32)
        return np.concatenate(rows), np.concatenate(vectors)


def use_one_thread() -> None:
    """Limit faiss to one thread. Each thread that searches calls this once.

    One query is too small for several cores, and more threads would slow the embedder.
    """
    faiss.omp_set_num_threads(1)


def stage_ends(scanned: npt.NDArray[np.int64]) -> list[int]:
    """Return the number of scanned cells at the end of each of at least two stages.

    With fewer than two cells, the first stage scans all of them.

    Args:
        scanned: Number of scanned vectors after each cell, ascending.
    """
    if len(scanned) < 2:
        return [len(scanned)] * 2
    wanted = [share * int(scanned[-1]) for share in STAGE_SHARES[:-1]]
    ends = {min(int(np.searchsorted(scanned, share)) + 1, len(scanned) - 1) for share in wanted}
    return [*sorted(ends), len(scanned)]


def _trained(dimension: int, vectors: Vectors) -> Any:
    """Return an empty IVF index with cells for vectors."""
    num_cells = max(1, math.isqrt(len(vectors)))
    quantizer = faiss.IndexFlatIP(dimension)
    ivf = faiss.IndexIVFFlat(quantizer, dimension, num_cells, faiss.METRIC_INNER_PRODUCT)
    ivf.nprobe = num_cells
    if num_cells == 1:
        quantizer.add(np.zeros((1, dimension), np.float32))
        ivf.is_trained = True
    else:
        ivf.cp.spherical = True
        ivf.cp.niter = _TRAINING_ROUNDS
        ivf.cp.min_points_per_centroid = 1
        ivf.cp.max_points_per_centroid = _TRAINING_VECTORS_PER_CELL
        ivf.train(vectors)
    # Without the map, removing a row would read every cell.
    ivf.set_direct_map_type(faiss.DirectMap.Hashtable)  # type: ignore[attr-defined]
    return ivf
