"""Threads that scan vectors. Searches that wait at the same time share their scans.

A thread takes the searches that wait for the same view and scans each cell once for all of them
that want it, as one matrix product. Under load a search therefore reads less memory. A search that
is alone is scanned as soon as a thread is free.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

import numpy as np
from threadpoolctl import threadpool_limits

from ragcache_retriever.search.cell_scan import TAIL, CellScan
from ragcache_retriever.search.files.stored_vectors import blocks
from ragcache_retriever.search.vector_index import IndexStage, Vectors

log = logging.getLogger(__name__)

MAX_SHARED: Final = 16
"""Most searches of one scan. Each waits for the stages of the others."""
_BUILD_NICENESS: Final = 15
BLOCK_VECTORS: Final = 4096
"""Vectors of one product. A cancelled search ends after at most one, about a millisecond."""


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
        """Yield the first stage, then always the latest one. Raises the error of the scan.

        A caller needs a millisecond or more to rank a stage. In that time a small scan ends, and
        the stages that it has passed would only delay its result.
        """
        found = self._queue.get()
        while found is not None:
            if isinstance(found, BaseException):
                raise found
            yield found
            if found.final:
                return  # without waiting for what the thread does next
            found = self._latest()

    def _latest(self) -> IndexStage | BaseException | None:
        found = self._queue.get()
        while isinstance(found, IndexStage) and not found.final and not self._queue.empty():
            found = self._queue.get()
        return found


def scan_together(scans: Sequence[CellScan]) -> None:
    """Scan for several searches of one view, until each has ended or was cancelled."""
    if len(scans) == 1:
        _scan_alone(scans[0])
        return
    shared = _SharedScan(scans)
    shared.scan_tail()
    while shared.is_running:
        shared.advance()


def _scan_alone(scan: CellScan) -> None:
    """Scan for one search. It does the same as a shared scan, with less work for each cell."""
    view, query = scan.view, scan.query.vector[np.newaxis]
    base, tail = view.base, view.tail
    for begin, end in blocks(tail.count, BLOCK_VECTORS):
        if scan.query.cancelled():
            return
        scan.count(end - begin)
        scan.take(TAIL, len(base) + begin, tail.vectors[begin:end] @ query[0])
    while not scan.is_done:
        for cell in np.sort(scan.next_cells()).tolist():
            first, last = int(base.offsets[cell]), int(base.offsets[cell + 1])
            for begin in range(first, last, BLOCK_VECTORS):
                if scan.query.cancelled():
                    return
                end = min(begin + BLOCK_VECTORS, last)
                scores = base.vectors.scores(begin, end, query)[:, 0]
                scan.count(len(scores))
                if scores.max() >= scan.threshold:
                    scan.take(cell, begin, scores)
        scan.checkpoint()


class _SharedScan:
    """Searches of one view that advance together, from checkpoint to checkpoint.

    A cell is scanned when the first of them needs it, for all that want it now or later.
    """

    def __init__(self, scans: Sequence[CellScan]) -> None:
        self._view = scans[0].view
        self._scans = scans
        self._queries = np.stack([scan.query.vector for scan in scans])
        self._running = {i for i, scan in enumerate(scans) if not scan.query.cancelled()}
        self._wanted_by: dict[int, list[int]] = {}  # cell that was not scanned -> searches
        for i, scan in enumerate(scans):
            for cell in scan.cells.tolist():
                self._wanted_by.setdefault(cell, []).append(i)

    @property
    def is_running(self) -> bool:
        """Whether a search has neither ended nor was cancelled."""
        return bool(self._running)

    def scan_tail(self) -> None:
        """Scan the rows that were added after the base was built."""
        tail, first = self._view.tail, len(self._view.base)
        for begin, end in blocks(tail.count, BLOCK_VECTORS):
            members = sorted(self._running)
            if not members:
                return
            scores = tail.vectors[begin:end] @ self._queries[members].T
            self._give(members, TAIL, first + begin, scores, self._running)

    def advance(self) -> None:
        """Bring each search to its next checkpoint."""
        needed_by: dict[int, set[int]] = {}
        for i in self._running:
            for cell in self._scans[i].next_cells().tolist():
                if cell in self._wanted_by:
                    needed_by.setdefault(cell, set()).add(i)
        for cell in sorted(needed_by):  # in the order of the file
            self._scan_cell(cell, self._wanted_by.pop(cell), needed_by[cell])
        for i in sorted(self._running):
            self._scans[i].checkpoint()
            if self._scans[i].is_done:
                self._running.remove(i)

    def _scan_cell(self, cell: int, members: Sequence[int], due: Collection[int]) -> None:
        base = self._view.base
        first, last = int(base.offsets[cell]), int(base.offsets[cell + 1])
        for begin in range(first, last, BLOCK_VECTORS):
            members = [i for i in members if i in self._running]
            if not members:
                return
            end = min(begin + BLOCK_VECTORS, last)
            scores = base.vectors.scores(begin, end, self._queries[members])
            self._give(members, cell, begin, scores, due)

    def _give(
        self,
        members: Sequence[int],
        cell: int,
        begin: int,
        scores: Vectors,
        due: Collection[int],
    ) -> None:
        """Give scores of shape (n, len(members)) to searches. Those that were cancelled end."""
        highest = scores.max(axis=0).tolist()
        for column, i in enumerate(members):
            scan = self._scans[i]
            scan.count(len(scores))
            if highest[column] >= scan.threshold:
                scan.take(cell, begin, scores[:, column], is_due=i in due)
            if scan.query.cancelled():
                self._running.remove(i)
