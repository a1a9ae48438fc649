"""Threads that scan vectors. Searches that wait at the same time share their scans.

A thread takes the searches that wait for the same view and scans each cell once for all of them
that want it, as one matrix product. Under load a search therefore reads less memory. A search that
is alone is scanned as soon as a thread is free.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from ragcache_retriever.search.cell_scan import TAIL, CellScan
from ragcache_retriever.search.files.stored_vectors import blocks
from ragcache_retriever.search.vector_index import IndexStage, Vectors

MAX_SHARED: Final = 16
"""Most searches of one scan. Each waits for the stages of the others."""
_BUILD_NICENESS: Final = 15
BLOCK_VECTORS: Final = 4096
"""Vectors of one product. A cancelled search ends after at most one, about a millisecond."""

Members = npt.NDArray[np.int64]
"""Numbers of searches of a group."""
Flags = npt.NDArray[np.bool_]
"""One flag for each search of a group."""


class ScanPool:
    """Threads for the scans of all indexes of a process.

    Args:
        num_threads: Scans at the same time, one per core.
    """

    def __init__(self, num_threads: int) -> None:
        # Products of this size are too small for several threads, and cores have other work.
        threadpool_limits(1, user_api="blas")
        self._changed = threading.Condition()  # guards the two below
        self._waiting: deque[tuple[CellScan, StageQueue]] = deque()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._work, name=f"scan-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, scan: CellScan, stages: StageQueue) -> None:
        """Have a search scanned. Its stages go to the queue."""
        with self._changed:
            if self._stopped:
                stages.end(RuntimeError("the scan threads have stopped"))
                return
            self._waiting.append((scan, stages))
            self._changed.notify()

    def close(self) -> None:
        """Finish the searches that wait, then end the threads."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while group := self._next_group():
            try:
                scan_together([scan for scan, _ in group])
            except BaseException as error:
                for _, stages in group:
                    stages.end(error)
            else:
                for _, stages in group:
                    stages.end()

    def _next_group(self) -> list[tuple[CellScan, StageQueue]]:
        """Wait for searches of one view and return them. None are left once the pool has closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopped)
            if not self._waiting:
                return []
            view = self._waiting[0][0].view
            group = [one for one in self._waiting if one[0].view is view][:MAX_SHARED]
            for one in group:
                self._waiting.remove(one)
            return group


@dataclass(frozen=True, slots=True)
class IndexThreads:
    """Threads that the indexes of a process share.

    Attributes:
        scans: Scan vectors for searches.
        background: Build bases, at a low priority.
    """

    scans: ScanPool
    background: Executor

    @classmethod
    def start(cls, num_scans: int) -> IndexThreads:
        """Start threads for so many scans at a time, and one for all bases."""
        background = ThreadPoolExecutor(1, "index-build", initializer=_lower_priority)
        return cls(ScanPool(num_scans), background)

    def close(self) -> None:
        """End the threads. All indexes are closed."""
        self.scans.close()
        self.background.shutdown(cancel_futures=True)


def _lower_priority() -> None:
    # On Linux a priority belongs to one thread. The ones that faiss starts to train inherit it.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BUILD_NICENESS)


class StageQueue:
    """The stages of one search on their way from the thread that scans."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[IndexStage | BaseException | None] = SimpleQueue()

    def put(self, stage: IndexStage) -> None:
        """Add a stage."""
        self._queue.put(stage)

    def end(self, error: BaseException | None = None) -> None:
        """Tell that no stage follows, because of an error if there is one."""
        self._queue.put(error)

    def stages(self) -> Iterator[IndexStage]:
        """Yield the stages as they come. Raises the error of the scan."""
        while (found := self._queue.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found


def scan_together(scans: Sequence[CellScan]) -> None:
    """Scan for several searches of one view, until each has ended or was cancelled."""
    shared = _SharedScan(scans)
    shared.scan_tail()
    while shared.is_running:
        shared.advance()


class _SharedScan:
    """Searches of one view that advance together, from checkpoint to checkpoint.

    A cell is scanned when the first of them needs it, for all that want it now or later.
    """

    def __init__(self, scans: Sequence[CellScan]) -> None:
        self._view = scans[0].view
        self._scans = scans
        self._queries = np.stack([scan.query.vector for scan in scans])
        self._running = np.array([not scan.query.cancelled() for scan in scans])
        self._wanted = np.zeros((len(scans), len(self._view.base.centroids)), bool)
        for i, scan in enumerate(scans):
            self._wanted[i, scan.cells] = True

    @property
    def is_running(self) -> bool:
        """Whether a search has neither ended nor was cancelled."""
        return bool(self._running.any())

    def scan_tail(self) -> None:
        """Scan the rows that were added after the base was built."""
        tail, first = self._view.tail, len(self._view.base)
        members = np.flatnonzero(self._running)
        for begin, end in blocks(tail.count, BLOCK_VECTORS):
            scores = tail.vectors[begin:end] @ self._queries[members].T
            self._give(members, TAIL, first + begin, scores, self._running)
            if not self._running[members].any():
                return

    def advance(self) -> None:
        """Bring each search to its next checkpoint."""
        due = np.zeros_like(self._wanted)
        for i in np.flatnonzero(self._running):
            due[i, self._scans[i].next_cells()] = True
        # In the order of the file.
        for cell in np.flatnonzero((due & self._wanted).any(axis=0)).tolist():
            members = np.flatnonzero(self._wanted[:, cell] & self._running)
            if len(members):
                self._scan_cell(cell, members, due[:, cell])
        for i in np.flatnonzero(self._running):
            self._scans[i].checkpoint()
            self._running[i] = not self._scans[i].is_done

    def _scan_cell(self, cell: int, members: Members, due: Flags) -> None:
        base = self._view.base
        queries = self._queries[members]
        first, last = int(base.offsets[cell]), int(base.offsets[cell + 1])
        for begin in range(first, last, BLOCK_VECTORS):
            end = min(begin + BLOCK_VECTORS, last)
            self._give(members, cell, begin, base.vectors.scores(begin, end, queries), due)
            if not self._running[members].any():
                return
        self._wanted[members, cell] = False

    def _give(self, members: Members, cell: int, begin: int, scores: Vectors, due: Flags) -> None:
        """Give scores of shape (n, len(members)) to searches. Those that were cancelled end."""
        thresholds = np.array([self._scans[i].threshold for i in members], np.float32)
        has_hits = scores.max(axis=0) >= thresholds
        for column, i in enumerate(members.tolist()):
            scan = self._scans[i]
            scan.count(len(scores))
            if has_hits[column]:
                scan.take(cell, begin, scores[:, column], is_due=bool(due[i]))
            if scan.query.cancelled():
                self._running[i] = False
