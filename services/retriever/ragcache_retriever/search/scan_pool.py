"""Threads that scan vectors. Searches that wait at the same time share their scans.

A thread takes the searches that wait for the same view and scans each cell once for all of them
that want it, as one matrix product. Under load a search therefore reads less memory. A search that
is alone is scanned as soon as a thread is free.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Final

import numpy as np
from threadpoolctl import threadpool_limits

from ragcache_retriever.search.cell_scan import CellScan
from ragcache_retriever.search.vector_index import IndexStage

MAX_SHARED: Final = 16
"""Most searches of one scan. Each waits for the stages of the others."""
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
    view = scans[0].view
    tail = view.tail
    queries = np.stack([scan.query.vector for scan in scans])
    if tail.count:
        scores = tail.vectors[: tail.count] @ queries.T
        for i, scan in enumerate(scans):
            scan.take(len(view.base), scores[:, i])
    running = {i: scan for i, scan in enumerate(scans) if not scan.query.cancelled()}
    while running:
        wanted: dict[int, list[int]] = {}
        for i, scan in running.items():
            for cell in scan.next_cells():
                wanted.setdefault(cell, []).append(i)
        for cell in sorted(wanted):
            _scan_cell(cell, [i for i in wanted[cell] if i in running], running, queries)
        for scan in running.values():
            scan.checkpoint()
        running = {i: scan for i, scan in running.items() if not scan.is_done}


def _scan_cell(
    cell: int, members: Sequence[int], running: dict[int, CellScan], queries: np.ndarray
) -> None:
    """Scan one cell in blocks. Searches that were cancelled leave ``running``."""
    if not members:
        return
    base = running[members[0]].view.base
    first, last = int(base.offsets[cell]), int(base.offsets[cell + 1])
    vectors = queries[list(members)]
    for begin in range(first, last, BLOCK_VECTORS):
        end = min(begin + BLOCK_VECTORS, last)
        scores = base.vectors.scores(begin, end, vectors)
        for column, i in enumerate(members):
            if i in running:
                running[i].take(begin, scores[:, column])
                if running[i].query.cancelled():
                    del running[i]
        if not any(i in running for i in members):
            return
