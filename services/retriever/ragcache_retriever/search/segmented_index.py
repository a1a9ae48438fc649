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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_core.retrieval.finality.search_estimator import SearchEstimator
from ragcache_retriever.search.cell_base import (
    CellBase,
    Probing,
    VectorSource,
    build_cell_base,
    empty_cell_base,
    opened_cell_base,
)
from ragcache_retriever.search.cell_scan import CellScan, Query
from ragcache_retriever.search.files.base_files import (
    BaseWriter,
    DamagedIndex,
    OpenedBase,
    open_base,
    remove_base,
    verify,
)
from ragcache_retriever.search.files.spool import Spool
from ragcache_retriever.search.files.stored_vectors import Positions, Precision
from ragcache_retriever.search.index_view import IndexView, LiveSource, Tail
from ragcache_retriever.search.scan_pool import ScanPool, StageQueue
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
"""Up to so many allowed rows are compared with the query without a scan."""

_ESTIMATOR: Final = "estimates.json"


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """How the vectors of a collection are searched.

    Attributes:
        recall: Searches stop when this recall is expected, unless they say otherwise. None: they
            scan all planned cells.
    """

    kind: IndexKind = IndexKind.AUTO
    precision: Precision = "float32"
    recall: float | None = None
    probing: Probing = Probing()


@dataclass(frozen=True, slots=True)
class IndexThreads:
    """Threads that the indexes of a process share.

    Attributes:
        scans: Scan vectors for searches.
        background: Build bases, at a low priority.
    """

    scans: ScanPool
    background: Executor


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
        self._is_closed = False

    @classmethod
    def open(
        cls, folder: Path | None, dimension: int, options: IndexOptions, threads: IndexThreads
    ) -> SegmentedIndex:
        """Open the index of a folder, or an empty one. Damaged files count as none.

        A damaged base is removed, so that the owner finds no rows and adds all of them again.
        """
        base = None
        if folder is not None:
            try:
                opened = open_base(folder)
                base = None if opened is None else _cell_base(opened, dimension)
            except DamagedIndex as error:
                log.warning("index: built again from the documents error=%s", error)
                remove_base(folder)
        index = cls(folder, dimension, options, threads, base or empty_cell_base(dimension))
        if folder is not None and base is not None and opened is not None:
            threads.background.submit(index._verify, opened)
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

    def set_kind(self, kind: IndexKind) -> None:
        """Change the kind, AUTO included. The base is built again in the background."""
        with self._lock:
            self._options = replace(self._options, kind=kind)
            is_other = _chosen(kind, len(self._view)) is not self._view.base.kind
            if is_other and not self.is_building and not self._is_closed:
                self._merge = self._threads.background.submit(self._merge_tail)

    def load(self, batches: Iterator[tuple[Rows, Vectors]]) -> None:
        """Replace the content by rows and vectors in batches. No search may run."""
        with Spool(self._folder, self._dimension) as spool:
            for rows, vectors in batches:
                spool.add(rows, vectors)
            base = self._build(spool.source(), None)
        with self._lock:
            self._view = IndexView(base, None, Tail.empty(self._dimension))

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
        if positions is not None and len(positions) <= _few(view):
            if not is_cancelled():
                yield _compared(view, vector, top_k, positions)
            return
        wanted = Query(vector, top_k, positions, recall or self._options.recall, is_cancelled)
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
            self._merge_if_grown()

    def close(self) -> None:
        """See VectorIndex.close."""
        with self._lock:
            self._is_closed = True
            merge = self._merge
        if merge is not None and not merge.cancel():
            merge.exception()  # waits
        self._save_estimator()

    def _save_estimator(self) -> None:
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            draft = self._folder / f"{_ESTIMATOR}.tmp"
            draft.write_text(self._estimator.to_json())
            draft.replace(self._folder / _ESTIMATOR)
        except OSError as error:
            log.warning("index: estimates not saved folder=%s error=%s", self._folder, error)

    # Merging

    def _merge_if_grown(self) -> None:
        """Start to build the next base if the tail has grown. The caller holds the lock."""
        view = self._view
        limit = max(MIN_TAIL, int(TAIL_SHARE * len(view.base)))
        has_grown = view.tail.count > limit or view.num_removed > max(limit, len(view.base) // 4)
        if has_grown and not self.is_building and not self._is_closed:
            self._merge = self._threads.background.submit(self._merge_tail)

    def _merge_tail(self) -> None:
        """Build a base from the view of now, and swap it in with the changes since."""
        try:
            with self._lock:
                merged = self._view
                self._removed_in_merge = []
            base = self._build(LiveSource(merged), merged.base)
            with self._lock:
                tail = self._view.tail.since(merged.tail.count)
                gone = np.concatenate([np.empty(0, np.int64), *self._removed_in_merge])
                view = IndexView(base, None, Tail.empty(self._dimension))
                self._view = view.changed(gone, tail.rows, tail.vectors)
        except Exception:
            # The old base and the tail serve on. The next change tries again.
            log.exception("index: base not built folder=%s", self._folder)
            return
        self._save_estimator()
        with self._lock:
            self._merge = None
            self._merge_if_grown()

    def _build(self, source: VectorSource, before: CellBase | None) -> CellBase:
        kind = _chosen(self._options.kind, len(source))
        keeps_cells = (
            before is not None
            and before.kind is kind is IndexKind.IVF
            and len(source) < GROWTH * before.trained_for
            and GROWTH * len(source) > before.trained_for
        )
        writer = None if self._folder is None else BaseWriter(self._folder)
        try:
            return build_cell_base(
                source,
                self._dimension,
                kind,
                self._options.precision,
                cells_of=before if keeps_cells else None,
                writer=writer,
            )
        except BaseException:
            if writer is not None:
                writer.abort()
            raise

    def _verify(self, opened: OpenedBase) -> None:
        try:
            verify(opened)
        except DamagedIndex as error:
            # The vectors are read from the documents when the retriever starts the next time.
            log.error("index: damaged, is built again at the next start error=%s", error)
            if self._folder is not None and self._view.base.rows is not None:
                (self._folder / "current.json").unlink(missing_ok=True)


def _estimator(folder: Path | None) -> SearchEstimator:
    if folder is not None:
        try:
            return SearchEstimator.from_json((folder / _ESTIMATOR).read_text())
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            log.warning("index: estimates are learned again folder=%s error=%s", folder, error)
    return SearchEstimator()


def _chosen(kind: IndexKind, num_vectors: int) -> IndexKind:
    if kind is IndexKind.AUTO:
        return IndexKind.FLAT if num_vectors <= FLAT_LIMIT else IndexKind.IVF
    return kind


def _cell_base(opened: OpenedBase, dimension: int) -> CellBase:
    try:
        base = opened_cell_base(opened)
    except (KeyError, ValueError, IndexError) as error:
        raise DamagedIndex(f"{opened.folder} lacks {error}") from error
    if base.centroids.shape[1] != dimension:
        raise DamagedIndex(f"{opened.folder} has vectors of {base.centroids.shape[1]} dimensions")
    return base


def _few(view: IndexView) -> int:
    return max(FEW_ALLOWED, int(FEW_ALLOWED_SHARE * len(view.base)))


def _compared(view: IndexView, vector: Vectors, top_k: int, positions: Positions) -> IndexStage:
    """Return the only stage of a search that compares the query with each allowed row."""
    scores = view.scores_at(positions, vector)
    rows = view.rows_at(positions)
    best = np.lexsort((rows, -scores))[:top_k]
    return IndexStage(
        tuple(rows[best].tolist()), tuple(scores[best].tolist()), 1.0, True, 1.0, len(positions)
    )


def _never() -> bool:
    return False
