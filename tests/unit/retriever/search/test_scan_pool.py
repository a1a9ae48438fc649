"""Searches that share their scans, against searches that are alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from ragcache_core.retrieval.finality.search_estimator import SearchEstimator
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.search.cell_base import Probing
from ragcache_retriever.search.cell_build import BuildOptions, build_cell_base
from ragcache_retriever.search.cell_scan import CellScan, Query
from ragcache_retriever.search.files.spool import SpooledSource
from ragcache_retriever.search.index_view import IndexView, Tail
from ragcache_retriever.search.scan_pool import ScanPool, StageQueue, scan_together
from ragcache_retriever.search.vector_index import IndexStage, Rows, Vectors
from tests.kit.vectors import DIMENSION, clustered, nearest, running_threads

PROBING = Probing(exact_limit=800, min_share=1 / 8)


def view_of(vectors: Vectors, num_tail: int, kind: IndexKind = IndexKind.IVF) -> IndexView:
    num_base = len(vectors) - num_tail
    source = SpooledSource(np.arange(num_base), vectors[:num_base])
    base = build_cell_base(source, DIMENSION, BuildOptions(kind))
    tail = Tail.empty(DIMENSION).added(np.arange(num_base, len(vectors)), vectors[num_base:])
    return IndexView(base, None, tail)


def searches(
    view: IndexView, queries: Vectors, allowed: Rows | None = None
) -> tuple[list[CellScan], list[list[IndexStage]]]:
    """Searches, and lists that get their stages. Half of them have a filter."""
    stages: list[list[IndexStage]] = [[] for _ in queries]
    scans = []
    for i, vector in enumerate(queries):
        positions = view.allowed_positions(allowed) if allowed is not None and i % 2 else None
        query = Query(vector, 5 + i % 7, positions, None, lambda: False)
        scans.append(CellScan(view, query, PROBING, SearchEstimator(), stages[i].append))
    return scans, stages


@pytest.mark.parametrize("num_queries", [1, 2, 9, 16])
@pytest.mark.parametrize("num_tail", [0, 300])
def test_shared_scans_give_each_search_the_stages_that_it_gets_alone(
    num_queries: int, num_tail: int
) -> None:
    view = view_of(clustered(6000, seed=1), num_tail)
    allowed = np.arange(0, 6000, 3)
    queries = clustered(num_queries, seed=2)
    scans, together = searches(view, queries, allowed)
    scan_together(scans)
    scans, alone = searches(view, queries, allowed)
    for scan in scans:
        scan_together([scan])
    for shared, own in zip(together, alone, strict=True):
        assert [stage.rows for stage in shared] == [stage.rows for stage in own]
        assert [stage.scores for stage in shared] == [stage.scores for stage in own]
        assert [stage.progress for stage in shared] == [stage.progress for stage in own]
        assert shared[-1].num_scored == own[-1].num_scored


def test_equal_queries_read_each_cell_once(monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_of(clustered(6000, seed=3), 0)
    reads = []
    scores = type(view.base.vectors).scores

    def counted(self: object, begin: int, end: int, queries: Vectors) -> Vectors:
        reads.append(begin)
        return scores(view.base.vectors, begin, end, queries)

    monkeypatch.setattr(type(view.base.vectors), "scores", counted)
    query = clustered(1, seed=4)
    scans, _ = searches(view, np.repeat(query, 12, axis=0))
    scan_together(scans)
    assert len(reads) == len(set(reads)) == len(scans[0].cells)


def test_a_search_that_is_cancelled_leaves_the_others_alone() -> None:
    vectors = clustered(6000, seed=5)
    view = view_of(vectors, 0, IndexKind.FLAT)
    scans, stages = searches(view, clustered(4, seed=6))
    scans[2].query = replace(scans[2].query, cancelled=lambda: True)
    scan_together(scans)
    assert not stages[2]
    for i in (0, 1, 3):
        query = scans[i].query
        expected = nearest(np.arange(6000), vectors, query.vector, query.top_k)
        assert stages[i][-1].rows == expected


@pytest.mark.parametrize("num_threads", [1, 3])
def test_many_callers_get_their_own_hits(num_threads: int) -> None:
    vectors = clustered(5000, seed=7)
    view = view_of(vectors, 100, IndexKind.FLAT)
    queries = clustered(64, seed=8)
    with running_threads(num_threads) as threads, ThreadPoolExecutor(16) as callers:

        def search(vector: Vectors) -> tuple[int, ...]:
            stages = StageQueue()
            query = Query(vector, 10, None, None, lambda: False)
            scan = CellScan(view, query, PROBING, SearchEstimator(), stages.put)
            threads.scans.submit(scan, stages)
            return list(stages.stages())[-1].rows

        for vector, rows in zip(queries, callers.map(search, queries), strict=True):
            assert rows == nearest(np.arange(5000), vectors, vector, 10)


def stage_at(progress: float) -> IndexStage:
    return IndexStage((), (), progress, progress == 1.0, progress, 0)


def test_a_caller_that_is_slower_than_the_scan_gets_the_first_stage_and_the_latest() -> None:
    queue = StageQueue()
    for progress in (0.1, 0.2, 0.3):
        queue.put(stage_at(progress))
    stages = queue.stages()
    assert next(stages).progress == 0.1
    assert next(stages).progress == 0.3
    queue.put(stage_at(0.5))
    assert next(stages).progress == 0.5
    for progress in (0.7, 1.0):
        queue.put(stage_at(progress))
    queue.end()
    assert [stage.progress for stage in stages] == [1.0]


def test_an_error_counts_more_than_the_stages_before_it() -> None:
    queue = StageQueue()
    for progress in (0.1, 0.2):
        queue.put(stage_at(progress))
    queue.end(OSError("the file system is gone"))
    stages = queue.stages()
    assert next(stages).progress == 0.1
    with pytest.raises(OSError, match="file system"):
        next(stages)


def test_an_error_of_a_scan_reaches_its_caller() -> None:
    view = view_of(clustered(500, seed=9), 0)

    def fail() -> bool:
        raise OSError("the file system is gone")

    pool = ScanPool(1)
    stages = StageQueue()
    query = Query(clustered(1, seed=10)[0], 3, None, None, fail)
    pool.submit(CellScan(view, query, PROBING, SearchEstimator(), stages.put), stages)
    with pytest.raises(OSError, match="file system"):
        list(stages.stages())
    pool.close()


def test_a_closed_pool_finishes_what_waits_and_refuses_more() -> None:
    view = view_of(clustered(3000, seed=11), 0)
    pool = ScanPool(1)
    queues = [StageQueue() for _ in range(20)]
    query = Query(clustered(1, seed=12)[0], 3, None, None, lambda: False)
    for queue in queues:
        pool.submit(CellScan(view, query, PROBING, SearchEstimator(), queue.put), queue)
    closing = threading.Thread(target=pool.close)
    closing.start()
    assert all(list(queue.stages())[-1].final for queue in queues)
    closing.join()
    delayed = StageQueue()
    pool.submit(CellScan(view, query, PROBING, SearchEstimator(), delayed.put), delayed)
    with pytest.raises(RuntimeError, match="stopped"):
        list(delayed.stages())
