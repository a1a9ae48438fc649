"""An immutable faiss index of vectors, searched in parts.

Vectors have positions, in the order of their rows. A flat index has cells, too: blocks of
positions, which are all scanned. So one code scans both, and a search can end after any cell.

Source: RAGCache section 5.3, staged search of IVF and HNSW.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import faiss
import numpy as np
import numpy.typing as npt

from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_core.sizing import index_bytes
from ragcache_retriever.search.staged_hits import STAGE_SHARES
from ragcache_retriever.search.vector_index import Rows, Vectors

Precision = Literal["float32", "sq8"]
Positions = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_faiss: Any = faiss  # its types leave out much of what Python can call

STEP_VECTORS: Final = 1 << 14
"""Most vectors of one part of a scan, about a millisecond. A search can end between parts."""
COMPARED_BLOCK: Final = 1 << 12
FIRST_BEAM_SHARE: Final = 1 / 8
MOST_FIRST_BEAM_SHARE: Final = 1 / 4
"""Share of the candidates that the first of two walks keeps: the first, or the second if that many
hits are wanted. faiss cannot continue a walk, so the first one is the price of an early stage."""
WALK_SHARE: Final = 1 / 10
"""Least share of the vectors that may be found for a walk. Fewer are compared directly."""


@dataclass(frozen=True, slots=True)
class SearchEffort:
    """How much of a large collection a search reads.

    Attributes:
        exact_limit: Vectors of the scanned cells at least, and vectors that a filter leaves up to
            which all of them are compared.
        min_share: Share of all vectors in the scanned cells at least.
        beam: Candidates that a walk over a graph keeps (efSearch), at least twice the wanted hits.
    """

    exact_limit: int = 20_000
    min_share: float = 1 / 16
    beam: int = 128


@dataclass(frozen=True, slots=True)
class SearchPart:
    """What one part of a search has found.

    Attributes:
        found: Rows and scores, the best ones of this part. They may repeat those of an earlier one.
        progress: Finished share of the search, 1 in the last part.
        num_scored: Vectors that this part was compared with. A walk counts its candidates.
        ends_stage: Whether the caller gets a stage now.
    """

    found: list[tuple[int, float]]
    progress: float
    num_scored: int
    ends_stage: bool


class FaissBase:
    """Vectors by position, for any number of searches at a time.

    Args:
        kind: FLAT, IVF or HNSW.
        with_rows: An IndexIDMap of ascending rows that owns an IndexIVF with a direct map, or an
            IndexHNSW. None: there are no vectors.

    Attributes:
        index: The inner index.
        rows: Row of each position.
    """

    def __init__(self, kind: IndexKind, precision: Precision, with_rows: Any) -> None:
        self.kind = kind
        self.precision = precision
        self.with_rows = with_rows
        self.index: Any = None
        self.rows: Rows = np.empty(0, np.int64)
        if with_rows is None:
            return
        self.index = faiss.downcast_index(with_rows.index)
        self.rows = faiss.rev_swig_ptr(with_rows.id_map.data(), with_rows.id_map.size())
        if kind is not IndexKind.HNSW:
            entries = self.index.direct_map.array
            # The upper half of an entry is the cell, the lower one the place in it.
            self._cell_entries = faiss.rev_swig_ptr(entries.data(), entries.size())
            self._sizes = self._num_in_cells(np.arange(len(self.rows)))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def memory_bytes(self) -> int:
        """Memory of the vectors, rows, cells and links."""
        if not len(self):
            return 0
        has_graph = self.kind is IndexKind.HNSW
        return index_bytes(len(self), self.index.d, self.precision, has_graph=has_graph)

    def positions_of(self, rows: Rows) -> Positions:
        """Return the positions of rows. Rows that this base does not have are left out."""
        if not len(self):
            return np.empty(0, np.int64)
        found = np.minimum(np.searchsorted(self.rows, rows), len(self) - 1)
        return np.asarray(found[self.rows[found] == rows])

    def gather(self, positions: Positions) -> Vectors:
        """Return vectors, shape (len(positions), dimension)."""
        return np.asarray(self.index.reconstruct_batch(positions))

    def search(
        self,
        query: Vectors,
        top_k: int,
        effort: SearchEffort,
        mask: Mask | None,
        allowed: Positions | None,
    ) -> Iterator[SearchPart]:
        """Search in parts, the last one with progress 1. There is a vector that may be found.

        Args:
            query: Shape (dimension,).
            mask: Which positions may be found. None: all.
            allowed: The same as positions, if there is a filter.
        """
        if self.kind is not IndexKind.HNSW:
            return self._scan(query, top_k, effort, mask, allowed)
        num_found = len(self) if mask is None else int(mask.sum())
        few = max(effort.exact_limit, WALK_SHARE * len(self))
        if allowed is not None and num_found <= few:
            return self._compare(query, top_k, mask)
        beam = math.ceil(max(effort.beam, 2 * top_k) * len(self) / num_found)
        return self._walk(query, top_k, min(beam, len(self)), mask, min(top_k, num_found))

    def planned_cells(
        self,
        query: Vectors,
        effort: SearchEffort,
        mask: Mask | None = None,
        allowed: Positions | None = None,
    ) -> tuple[Positions, Positions]:
        """Return the cells that a search scans, nearest first, and the vectors up to each.

        Only vectors that may be found count.
        """
        sizes, total = self._sizes, len(self)
        if allowed is not None:
            sizes, total = self._num_in_cells(allowed), len(allowed)
        elif mask is not None:
            sizes = sizes - self._num_in_cells(np.flatnonzero(~mask))
        if self.kind is IndexKind.FLAT:
            ranked, limit = np.arange(len(sizes)), total
        else:
            ranked = self.index.quantizer.search(query[np.newaxis], len(sizes))[1][0]
            limit = max(effort.exact_limit, math.ceil(effort.min_share * total))
        ranked = ranked[sizes[ranked] > 0]
        scanned = sizes[ranked].cumsum()
        end = int(scanned.searchsorted(limit)) + 1
        return ranked[:end], scanned[:end]

    def _num_in_cells(self, positions: Positions) -> Positions:
        return np.bincount(self._cell_entries[positions] >> 32, minlength=self.index.nlist)

    def _scan(
        self,
        query: Vectors,
        top_k: int,
        effort: SearchEffort,
        mask: Mask | None,
        allowed: Positions | None,
    ) -> Iterator[SearchPart]:
        """Scan the nearest cells, a slice of them at a time."""
        cells, scanned = self.planned_cells(query, effort, mask, allowed)
        shares = STAGE_SHARES if self.kind is IndexKind.IVF else (1.0,)
        selector: Any = None
        if mask is not None:
            selector = _faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little"))
        parameters = _faiss.SearchParametersIVF(sel=selector)
        begin = before = 0
        for end, ends_stage in scan_ends(scanned, shares):
            parameters.nprobe = end - begin
            found = self._scan_cells(query, top_k, cells[begin:end], parameters)
            so_far = int(scanned[end - 1])
            yield SearchPart(found, so_far / int(scanned[-1]), so_far - before, ends_stage)
            begin, before = end, so_far

    def _scan_cells(
        self, query: Vectors, top_k: int, cells: Positions, parameters: Any
    ) -> list[tuple[int, float]]:
        distances = np.zeros(len(cells), np.float32)
        scores = np.empty(top_k, np.float32)
        positions = np.empty(top_k, np.int64)
        # Unlike search_preassigned, it takes parameters of one call.
        self.index.search_preassigned_c(
            1,
            faiss.swig_ptr(query),
            top_k,
            faiss.swig_ptr(cells),
            faiss.swig_ptr(distances),
            faiss.swig_ptr(scores),
            faiss.swig_ptr(positions),
            False,
            parameters,
        )
        is_hit = positions >= 0
        return pairs(self.rows[positions[is_hit]], scores[is_hit])

    def _walk(
        self, query: Vectors, top_k: int, beam: int, mask: Mask | None, num_wanted: int
    ) -> Iterator[SearchPart]:
        """Walk over the graph with few candidates and then with all of them.

        Candidates that may not be found are left out afterwards. If they leave too few hits, they
        are between the query and those, so all are compared.
        """
        least, most = (
            math.ceil(share * beam) for share in (FIRST_BEAM_SHARE, MOST_FIRST_BEAM_SHARE)
        )
        for candidates in sorted({max(least, min(top_k, most)), beam}):
            parameters = _faiss.SearchParametersHNSW(efSearch=candidates)
            found = self.index.search(query[np.newaxis], candidates, params=parameters)
            scores, positions = found[0][0], found[1][0]
            is_hit = positions >= 0
            if mask is not None:
                is_hit &= mask[positions]
            if candidates == beam and is_hit.sum() < num_wanted:
                yield from self._compare(query, top_k, mask)
                return
            hits = pairs(self.rows[positions[is_hit][:top_k]], scores[is_hit][:top_k])
            yield SearchPart(hits, candidates / beam, candidates, ends_stage=True)

    def _compare(self, query: Vectors, top_k: int, mask: Mask | None) -> Iterator[SearchPart]:
        """Compare the query with each vector that may be found, in one stage."""
        positions = np.arange(len(self)) if mask is None else np.flatnonzero(mask)
        for begin in range(0, len(positions), COMPARED_BLOCK):
            block = positions[begin : begin + COMPARED_BLOCK]
            scores = self.gather(block) @ query
            best = np.argsort(-scores, kind="stable")[:top_k]
            hits = pairs(self.rows[block[best]], scores[best])
            progress = (begin + len(block)) / len(positions)
            yield SearchPart(hits, progress, len(block), ends_stage=progress == 1)


def pairs(rows: Rows, scores: Vectors) -> list[tuple[int, float]]:
    """Return rows with their scores."""
    return list(zip(rows.tolist(), scores.tolist(), strict=True))


def scan_ends(scanned: Positions, shares: tuple[float, ...]) -> list[tuple[int, bool]]:
    """Return the number of scanned cells after each part, and whether the part ends a stage.

    Args:
        scanned: Vectors up to each cell, ascending.
        shares: Share of the vectors at the end of each stage, the last one 1.
    """
    total = int(scanned[-1])
    targets, is_stage, begin = [], [], 0.0
    for share in shares:
        num_parts = max(1, math.ceil((share * total - begin) / STEP_VECTORS))
        size = (share * total - begin) / num_parts
        targets += [begin + i * size for i in range(1, num_parts)] + [share * total]
        is_stage += [False] * (num_parts - 1) + [True]
        begin = share * total
    ends = (np.searchsorted(scanned, targets) + 1).tolist()
    return sorted(dict(sorted(zip(ends, is_stage, strict=True))).items())
