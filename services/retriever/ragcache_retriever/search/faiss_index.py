"""The embedded vector index: an immutable faiss index as its base, and a tail of later changes.

A search takes the view of the moment and holds no lock, so neither ingestion nor training nor a
slow disk blocks it. A change makes a new view. When the tail has grown, a thread in the background
builds the next base from the view of that moment, writes it to a file and swaps it in.

The position of an index in the log of documents is the set of its rows. After a restart its owner
compares them with the rows of the documents (``rows``), and applies the difference.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import faiss
import numpy as np
from threadpoolctl import threadpool_limits
from typing_extensions import override

from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_core.retrieval.stage_counts import StageCounts
from ragcache_retriever.concurrency.cpu import lower_priority
from ragcache_retriever.search.faiss_base import FaissBase, Precision, SearchEffort
from ragcache_retriever.search.faiss_build import (
    BuildAborted,
    VectorSource,
    build_base,
    empty_base,
)
from ragcache_retriever.search.faiss_files import DamagedIndex, read_base, spooled, write_base
from ragcache_retriever.search.index_view import IndexView, Tail
from ragcache_retriever.search.staged_hits import StagedHits
from ragcache_retriever.search.vector_index import (
    IndexStage,
    RowIndex,
    Rows,
    VectorIndexes,
    Vectors,
)

log = logging.getLogger(__name__)

FLAT_LIMIT: Final = 20_000
"""Most vectors of an index that AUTO scans completely: about 3 ms on one core."""

MIN_TAIL: Final = 2048
TAIL_SHARE: Final = 1 / 8
"""The tail is merged when it has more rows than both of these, and the base as many removed."""

MAX_BACKOFF: Final = 8
"""After each failed merge the next one waits for twice the changes, up to this factor."""

KIND_RETRY_S: Final = 15.0
"""Time after a failed merge in which a change of the kind causes no other one, as often doubled."""


class BuildThread(ThreadPoolExecutor):
    """The thread that builds the bases of all indexes of a process, at a low priority."""

    def __init__(self) -> None:
        # The threads that faiss starts to train inherit the priority.
        super().__init__(1, "index-build", initializer=lower_priority)
        # Products of a search are too small for several threads, and cores have other work.
        threadpool_limits(1, user_api="blas")


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """How the vectors of a collection are searched.

    Attributes:
        recall: Searches stop at a stage that has had this recall, unless they say otherwise.
            None: they finish.
    """

    kind: IndexKind = IndexKind.AUTO
    precision: Precision = "float32"
    recall: float | None = None
    effort: SearchEffort = field(default_factory=SearchEffort)


class FaissIndex(RowIndex):
    """The vectors of one generation.

    Args:
        folder: For its file. None: keep everything in memory.
        dimension: Length of the vectors.
        base: The base to begin with.
    """

    def __init__(
        self,
        folder: Path | None,
        dimension: int,
        options: IndexOptions,
        builds: BuildThread,
        base: FaissBase,
    ) -> None:
        self._folder = folder
        self._dimension = dimension
        self._options = options
        self._builds = builds
        self._counts = StageCounts()
        self._lock = threading.Lock()  # guards changes of the view, for microseconds
        self._view = IndexView(base, None, Tail.empty(dimension))
        self._merge: Future[None] | None = None
        self._removed_in_merge: list[Rows] = []
        self._num_failures = 0
        self._has_new_kind = False
        self._no_new_kind_until = 0.0
        self._is_closed = False

    @classmethod
    def open(
        cls, folder: Path | None, dimension: int, options: IndexOptions, builds: BuildThread
    ) -> FaissIndex:
        """Open the index of a folder, or an empty one. A damaged file counts as none.

        A base of another precision or dimension counts as damaged. The owner then finds no rows
        and adds all of them again.
        """
        found = None
        if folder is not None:
            try:
                found = read_base(folder, dimension, options.precision)
            except DamagedIndex as error:
                log.warning("index: built again from the documents error=%s", error)
                shutil.rmtree(folder, ignore_errors=True)
        if found is None:
            return cls(folder, dimension, options, builds, empty_base(options.precision))
        index = cls(folder, dimension, options, builds, found)
        index.set_kind(options.kind)
        return index

    def __len__(self) -> int:
        return len(self._view)

    @property
    @override
    def kind(self) -> IndexKind:
        return self._view.base.kind

    @property
    def base(self) -> FaissBase:
        """The present base."""
        return self._view.base

    @property
    @override
    def is_building(self) -> bool:
        merge = self._merge
        return merge is not None and not merge.done()

    @property
    @override
    def memory_bytes(self) -> int:
        view = self._view
        return view.base.memory_bytes + view.tail.vectors.nbytes + view.tail.rows.nbytes

    @override
    def rows(self) -> Rows:
        return self._view.rows()

    @override
    def load(self, batches: Iterable[tuple[Rows, Vectors]]) -> None:
        # A graph takes about a millisecond of a core per vector, so a flat base serves first.
        with spooled(self._folder, self._dimension, batches) as source:
            kind = _chosen(self._options.kind, len(source.rows))
            base = self._built(source, IndexKind.FLAT if kind is IndexKind.HNSW else kind)
        with self._lock:
            self._view = IndexView(base, None, Tail.empty(self._dimension))
            self._has_new_kind = len(base) > 0
            self._merge_if_needed()

    @override
    def set_kind(self, kind: IndexKind) -> None:
        with self._lock:
            self._options = replace(self._options, kind=kind)
            self._has_new_kind = True
            self._merge_if_needed()

    @override
    def search(
        self,
        query: Vectors,
        top_k: int,
        *,
        allowed: Rows | None = None,
        recall: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[IndexStage]:
        """Yield the stages of a search: the first one, the last one, and some between them.

        A caller may need a millisecond to rank a stage. The search goes on for as long as the
        caller took, and leaves out the stages that it passes in that time.
        """
        faiss.omp_set_num_threads(1)  # of this thread only
        vector = np.ascontiguousarray(query, np.float32)
        hits = StagedHits(self._counts, top_k, recall or self._options.recall)
        parts = self._view.search(vector, top_k, self._options.effort, allowed)
        found: list[tuple[int, float]] = []
        num_scored = 0
        caller_s, resumed = 0.0, time.perf_counter()
        while cancelled is None or not cancelled():
            part = next(parts)
            found += part.found
            num_scored += part.num_scored
            if not part.ends_stage:
                continue
            stage = hits.stage(found, part.progress, num_scored, is_last=part.progress == 1)
            found = []
            ended = time.perf_counter()
            if stage.final or ended - resumed >= caller_s:
                yield stage
                resumed = time.perf_counter()
                caller_s = resumed - ended
            if stage.final:
                return

    @override
    def apply(self, removed: Sequence[int], added: Sequence[int], vectors: Vectors) -> None:
        gone, new = np.array(removed, np.int64), np.array(added, np.int64)
        with self._lock:
            self._view = self._view.changed(gone, new, vectors)
            if self.is_building:
                self._removed_in_merge.append(gone)
            self._merge_if_needed()

    @override
    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            merge = self._merge
        if merge is not None and not merge.cancel():
            wait([merge])

    # Merging

    def _merge_if_needed(self) -> None:
        """Start to build the next base if it is time. The caller holds the lock."""
        view = self._view
        limit = max(MIN_TAIL, int(TAIL_SHARE * len(view.base)))
        limit *= min(1 << self._num_failures, MAX_BACKOFF)
        has_grown = view.tail.count > limit or view.num_removed > max(limit, len(view.base) // 4)
        has_new_kind = (
            self._has_new_kind
            and _chosen(self._options.kind, len(view)) != self.kind
            and time.monotonic() >= self._no_new_kind_until
        )
        may_merge = not (self.is_building or self._is_closed)
        if (has_grown or has_new_kind) and may_merge:
            self._has_new_kind = False
            self._merge = self._builds.submit(self._merge_tail)

    def _merge_tail(self) -> None:
        """Build a base from the view of now, and swap it in with the changes since."""
        try:
            with self._lock:
                merged = self._view
                self._removed_in_merge = []
            kind = _chosen(self._options.kind, len(merged))
            base = self._built(merged.source(), kind)
            with self._lock:
                tail = self._view.tail.since(merged.tail.count)
                gone = np.concatenate([np.empty(0, np.int64), *self._removed_in_merge])
                view = IndexView(base, None, Tail.empty(self._dimension))
                if base.kind is not merged.base.kind:  # it has other stages
                    self._counts = StageCounts()
                self._view = view.changed(gone, tail.rows, tail.vectors)
        except BuildAborted:
            return
        except Exception:
            # The old base and the tail serve on.
            log.exception("index: base not built folder=%s", self._folder)
            with self._lock:
                self._num_failures += 1
                self._has_new_kind = True
                backoff = min(1 << self._num_failures, MAX_BACKOFF)
                self._no_new_kind_until = time.monotonic() + KIND_RETRY_S * backoff
            return
        with self._lock:
            self._num_failures = 0
            self._merge = None
            self._merge_if_needed()

    def _built(self, source: VectorSource, kind: IndexKind) -> FaissBase:
        base = build_base(source, kind, self._view.base, lambda: self._is_closed)
        if self._folder is not None:
            write_base(self._folder, base)
        return base


class FaissIndexes(VectorIndexes):
    """The indexes of a data folder.

    Args:
        folder: Has a folder for each generation. None: keep everything in memory.
        options: Of each index, besides its kind.
    """

    def __init__(self, folder: Path | None, options: IndexOptions, builds: BuildThread) -> None:
        self._folder = folder
        self._options = options
        self._builds = builds

    @override
    def open(self, generation: int, dimension: int, kind: IndexKind) -> FaissIndex:
        folder = None if self._folder is None else self._folder / str(generation)
        options = replace(self._options, kind=kind)
        return FaissIndex.open(folder, dimension, options, self._builds)

    @override
    def remove(self, generation: int) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder / str(generation), ignore_errors=True)

    @override
    def stored_generations(self) -> list[int]:
        if self._folder is None or not self._folder.exists():
            return []
        return sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdecimal())


def _chosen(kind: IndexKind, num_vectors: int) -> IndexKind:
    if kind is IndexKind.AUTO:
        return IndexKind.FLAT if num_vectors <= FLAT_LIMIT else IndexKind.IVF
    return kind
