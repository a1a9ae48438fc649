"""The embedded vector index: an immutable base on disk and a tail of changes in memory.

A search takes the view of the moment and holds no lock, so neither ingestion nor training nor a
slow disk blocks it. A change makes a new view. When the tail has grown, a thread in the background
builds the next base from the view of that moment, writes it to files and swaps it in.

The position of an index in the log of documents is the set of its rows. After a restart its owner
compares them with the rows of the documents (``rows``), and applies the difference.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from ragcache_core.retrieval.finality.search_estimator import SearchEstimator
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.search.cell_base import (
    CellBase,
    Probing,
    empty_cell_base,
    opened_cell_base,
)
from ragcache_retriever.search.cell_build import (
    BuildAborted,
    BuildOptions,
    VectorSource,
    build_cell_base,
)
from ragcache_retriever.search.cell_scan import CellScan, Query
from ragcache_retriever.search.files.base_files import (
    BaseWriter,
    DamagedIndex,
    OpenedBase,
    forget_base,
    open_base,
    remove_base,
    verify,
)
from ragcache_retriever.search.files.learned_file import read_learned, write_learned
from ragcache_retriever.search.files.spool import Spool
from ragcache_retriever.search.files.stored_vectors import Positions, Precision
from ragcache_retriever.search.hnsw_scan import HnswScan, few_for_a_walk
from ragcache_retriever.search.index_view import IndexView, LiveSource, Tail
from ragcache_retriever.search.scan_pool import IndexThreads, StageQueue
from ragcache_retriever.search.vector_index import IndexStage, Rows, Vectors

log = logging.getLogger(__name__)

FLAT_LIMIT: Final = 20_000
"""Most vectors of an index that AUTO scans completely: about 3 ms on one core."""

MIN_TAIL: Final = 2048
TAIL_SHARE: Final = 1 / 8
"""The tail is merged when it has more rows than both of these, and the base as many removed."""

GROWTH: Final = 4
"""Cells are trained again at this many times the vectors that they were trained for. They then have
twice their intended size."""

FEW_ALLOWED: Final = 4096
FEW_ALLOWED_SHARE: Final = 1 / 50
"""Up to so many allowed rows are compared with the query without a scan. A walk over a graph has a
limit of its own."""

MAX_BACKOFF: Final = 8
"""After each failed merge the next one waits for twice the changes, up to this factor."""

_ESTIMATOR: Final = "estimates.json"


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """How the vectors of a collection are searched.

    Attributes:
        effort: Candidates that a walk over a graph keeps (efSearch).
        recall: Searches stop when this recall is expected, unless they say otherwise. None: they
            scan all planned cells.
    """

    kind: IndexKind = IndexKind.AUTO
    precision: Precision = "float32"
    recall: float | None = None
    probing: Probing = field(default_factory=Probing)
    effort: int = 128


class SegmentedIndex:
    """The vectors of one generation, see VectorIndex.

    Args:
        folder: For its files. None: keep everything in memory.
        dimension: Length of the vectors.
        base: The base to begin with.
    """

    def __init__(
        self,
        folder: Path | None,
        dimension: int,
        options: IndexOptions,
        threads: IndexThreads,
        base: CellBase,
    ) -> None:
        self._folder = folder
        self._dimension = dimension
        self._options = options
        self._threads = threads
        self._estimator = _estimator(folder)
        self._lock = threading.Lock()  # guards changes of the view, for microseconds
        self._view = IndexView(base, None, Tail.empty(dimension))
        self._merge: Future[None] | None = None
        self._removed_in_merge: list[Rows] = []
        self._num_failures = 0
        self._has_new_kind = False
        self._is_loading = False
        self._is_damaged = False
        self._is_closed = False

    @classmethod
    def open(
        cls, folder: Path | None, dimension: int, options: IndexOptions, threads: IndexThreads
    ) -> SegmentedIndex:
        """Open the index of a folder, or an empty one. Damaged files count as none.

        A base that is damaged, or of another precision or dimension, is removed. The owner then
        finds no rows and adds all of them again.
        """
        found = None
        if folder is not None:
            try:
                found = _opened(folder, dimension, options.precision)
            except DamagedIndex as error:
                log.warning("index: built again from the documents error=%s", error)
                remove_base(folder)
        if found is None:
            return cls(folder, dimension, options, threads, empty_cell_base(dimension))
        opened, base = found
        index = cls(folder, dimension, options, threads, base)
        threads.background.submit(index._verify, opened)
        index.set_kind(options.kind)
        return index

    def __len__(self) -> int:
        return len(self._view)

    @property
    def kind(self) -> IndexKind:
        """The kind of the present base: FLAT, IVF or HNSW."""
        return self._view.base.kind

    @property
    def is_building(self) -> bool:
        """Whether the next base is being built."""
        merge = self._merge
        return merge is not None and not merge.done()

    @property
    def memory_bytes(self) -> int:
        """Bytes of vectors and rows, mapped files included."""
        view = self._view
        return view.base.memory_bytes + view.tail.vectors.nbytes + view.tail.rows.nbytes

    def rows(self) -> Rows:
        """Return all rows, sorted."""
        return self._view.rows()

    @property
    def is_damaged(self) -> bool:
        """Whether files were found damaged, so that the owner has to call ``load``."""
        return self._is_damaged

    def load(self, batches: Iterable[tuple[Rows, Vectors]]) -> None:
        """Replace the content by rows and vectors in batches.

        Searches use the former content meanwhile. The thread that applies changes calls it. A graph
        takes about a millisecond of a core per vector, so it is built in the background.
        """
        with self._lock:
            self._is_loading, merge = True, self._merge
        try:
            if merge is not None and not merge.cancel():
                wait([merge])
            with Spool(self._folder, self._dimension) as spool:
                for rows, vectors in batches:
                    spool.add(rows, vectors)
                base = self._first_base(spool.source())
        finally:
            self._is_loading = False
        with self._lock:
            self._view = IndexView(base, None, Tail.empty(self._dimension))
            self._is_damaged = False
            if len(base) and base.kind is not _chosen(self._options.kind, len(base)):
                self._has_new_kind = True
                self._merge_if_needed()

    def set_kind(self, kind: IndexKind) -> None:
        """Change the kind, AUTO included. The index is built again in the background."""
        with self._lock:
            self._options = replace(self._options, kind=kind)
            self._has_new_kind = True
            self._merge_if_needed()

    # VectorIndex

    def search(
        self,
        query: Vectors,
        top_k: int,
        *,
        allowed: Rows | None = None,
        recall: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[IndexStage]:
        """See VectorIndex.search."""
        view = self._view
        vector = np.ascontiguousarray(query, np.float32)
        positions = None if allowed is None else view.allowed_positions(allowed)
        is_cancelled = cancelled or _never
        effort = self._options.effort
        if positions is not None and len(positions) <= _few(view, effort):
            yield from _compared(view, vector, top_k, positions, is_cancelled)
            return
        wanted = Query(vector, top_k, positions, recall or self._options.recall, is_cancelled)
        graph = view.base.graph
        if graph is not None:
            yield from HnswScan(view, graph, wanted, effort, self._estimator).stages()
            return
        stages = StageQueue()
        scan = CellScan(view, wanted, self._options.probing, self._estimator, stages.put)
        self._threads.scans.submit(scan, stages)
        yield from stages.stages()

    def apply(self, removed: Sequence[int], added: Sequence[int], vectors: Vectors) -> None:
        """See VectorIndex.apply."""
        gone, new = np.array(removed, np.int64), np.array(added, np.int64)
        with self._lock:
            self._view = self._view.changed(gone, new, vectors)
            if self.is_building:
                self._removed_in_merge.append(gone)
            self._merge_if_needed()

    def close(self) -> None:
        """See VectorIndex.close."""
        with self._lock:
            self._is_closed = True
            merge = self._merge
        if merge is not None and not merge.cancel():
            wait([merge])
        self._save_estimator()

    def _save_estimator(self) -> None:
        if self._folder is not None:
            write_learned(self._folder / _ESTIMATOR, self._estimator.to_json())

    # Merging

    def _merge_if_needed(self) -> None:
        """Start to build the next base if it is time. The caller holds the lock."""
        view = self._view
        limit = max(MIN_TAIL, int(TAIL_SHARE * len(view.base)))
        limit *= min(1 << self._num_failures, MAX_BACKOFF)
        has_grown = view.tail.count > limit or view.num_removed > max(limit, len(view.base) // 4)
        has_new_kind = self._has_new_kind and _chosen(self._options.kind, len(view)) != self.kind
        may_merge = not (self.is_building or self._is_merge_useless())
        if (has_grown or has_new_kind) and may_merge:
            self._has_new_kind = False
            self._merge = self._threads.background.submit(self._merge_tail)

    def _merge_tail(self) -> None:
        """Build a base from the view of now, and swap it in with the changes since."""
        try:
            with self._lock:
                if self._is_merge_useless():
                    raise BuildAborted
                merged = self._view
                self._removed_in_merge = []
            base = self._next_base(LiveSource(merged), merged.base)
            with self._lock:
                if self._is_merge_useless():
                    raise BuildAborted
                tail = self._view.tail.since(merged.tail.count)
                gone = np.concatenate([np.empty(0, np.int64), *self._removed_in_merge])
                view = IndexView(base, None, Tail.empty(self._dimension))
                self._view = view.changed(gone, tail.rows, tail.vectors)
        except BuildAborted:
            return
        except Exception:
            # The old base and the tail serve on.
            log.exception("index: base not built folder=%s", self._folder)
            with self._lock:
                self._num_failures += 1
            return
        self._save_estimator()
        with self._lock:
            self._num_failures = 0
            self._merge = None
            self._merge_if_needed()

    def _is_merge_useless(self) -> bool:
        """Whether the vectors are being replaced, or no search will use the next base."""
        return self._is_closed or self._is_damaged or self._is_loading

    def _first_base(self, source: VectorSource) -> CellBase:
        """Build a base without a graph."""
        kind = _chosen(self._options.kind, len(source))
        if kind is IndexKind.HNSW:
            kind = IndexKind.FLAT
        return self._build(source, kind, None, lambda: self._is_closed)

    def _next_base(self, source: VectorSource, before: CellBase) -> CellBase:
        kind = _chosen(self._options.kind, len(source))
        keeps_cells = (
            before.kind is kind is IndexKind.IVF
            and len(source) < GROWTH * before.trained_for
            and GROWTH * len(source) > before.trained_for
        )
        return self._build(source, kind, before if keeps_cells else None, self._is_merge_useless)

    def _build(
        self,
        source: VectorSource,
        kind: IndexKind,
        cells_of: CellBase | None,
        is_aborted: Callable[[], bool],
    ) -> CellBase:
        options = BuildOptions(kind, self._options.precision, cells_of, is_aborted)
        writer = None if self._folder is None else BaseWriter(self._folder)
        try:
            return build_cell_base(source, self._dimension, options, writer)
        except BaseException:
            if writer is not None:
                writer.abort()
            raise

    def _verify(self, opened: OpenedBase) -> None:
        """Check what was opened. It runs before any merge, which would hide damage."""
        try:
            verify(opened)
        except Exception as error:
            if not isinstance(error, DamagedIndex):
                log.exception("index: not verified folder=%s", opened.folder)
            log.warning("index: damaged, has to be loaded again error=%s", error)
            with self._lock:
                self._is_damaged = True
                forget_base(opened)


def _estimator(folder: Path | None) -> SearchEstimator:
    found = None
    if folder is not None:
        found = read_learned(folder / _ESTIMATOR, SearchEstimator.from_json)
    return found or SearchEstimator()


def _chosen(kind: IndexKind, num_vectors: int) -> IndexKind:
    if kind is IndexKind.AUTO:
        return IndexKind.FLAT if num_vectors <= FLAT_LIMIT else IndexKind.IVF
    return kind


def _opened(
    folder: Path, dimension: int, precision: Precision
) -> tuple[OpenedBase, CellBase] | None:
    """Return the base of a folder, None if it has none. Raises DamagedIndex."""
    opened = open_base(folder)
    if opened is None:
        return None
    base = opened_cell_base(opened)
    if (base.centroids.shape[1], base.vectors.precision) != (dimension, precision):
        raise DamagedIndex(f"{opened.folder} has vectors of another dimension or precision")
    return opened, base


def _few(view: IndexView, effort: int) -> int:
    """Return the most allowed rows that are compared with the query directly."""
    if view.base.graph is not None:
        return max(FEW_ALLOWED, few_for_a_walk(len(view.base), effort))
    return max(FEW_ALLOWED, int(FEW_ALLOWED_SHARE * len(view.base)))


def _compared(
    view: IndexView,
    vector: Vectors,
    top_k: int,
    positions: Positions,
    is_cancelled: Callable[[], bool],
) -> Iterator[IndexStage]:
    """Yield the only stage of a search that compares the query with each allowed row."""
    found = view.best_at(positions, vector, top_k, is_cancelled)
    if found is not None:
        yield IndexStage(*found, 1.0, True, 1.0, len(positions))


def _never() -> bool:
    return False
