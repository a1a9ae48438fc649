"""Searches of a segmented index over its graph."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.search import hnsw_scan, segmented_index
from ragcache_retriever.search.files.stored_vectors import Precision
from ragcache_retriever.search.hnsw_graph import HnswGraph
from ragcache_retriever.search.scan_pool import IndexThreads
from ragcache_retriever.search.segmented_index import IndexOptions, SegmentedIndex
from ragcache_retriever.search.vector_index import Rows, Vectors
from tests.kit.vectors import (
    DIMENSION,
    NONE,
    add,
    clustered,
    final,
    nearest,
    running_threads,
    wait_until_built,
)

NUM_VECTORS = 3000
VECTORS = clustered(NUM_VECTORS, seed=1)
QUERIES = clustered(40, seed=2)


@pytest.fixture(scope="module")
def threads() -> Iterator[IndexThreads]:
    with running_threads(1) as started:
        yield started


def opened(
    threads: IndexThreads, folder: Path | None = None, precision: Precision = "float32"
) -> SegmentedIndex:
    options = IndexOptions(IndexKind.HNSW, precision=precision)
    return SegmentedIndex.open(folder, DIMENSION, options, threads)


@pytest.fixture(scope="module")
def changed(threads: IndexThreads) -> SegmentedIndex:
    """An index with rows in base and tail. Some were removed."""
    index = opened(threads)
    index.load([(np.arange(2500), VECTORS[:2500])])
    wait_until_built(index)
    add(index, range(2500, NUM_VECTORS), VECTORS[2500:])
    index.apply(range(0, NUM_VECTORS, 7), (), NONE)
    return index


LIVE = np.array([row for row in range(NUM_VECTORS) if row % 7])


def recall(index: SegmentedIndex, rows: np.ndarray, allowed: np.ndarray | None = None) -> float:
    found = [set(final(index, query, 10, allowed).rows) for query in QUERIES]
    assert all(hits <= set(rows.tolist()) for hits in found)
    plain = [set(nearest(rows, VECTORS[rows], query, 10)) for query in QUERIES]
    return sum(len(a & b) for a, b in zip(found, plain, strict=True)) / (10 * len(QUERIES))


def test_nearly_all_hits_are_found_in_base_and_tail(changed: SegmentedIndex) -> None:
    assert changed.kind is IndexKind.HNSW
    assert recall(changed, LIVE) >= 0.99


def test_only_allowed_rows_are_found(
    changed: SegmentedIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segmented_index, "FEW_ALLOWED", 0)
    monkeypatch.setattr(hnsw_scan, "ROWS_PER_STEP", 0.25)  # so that a walk is cheaper
    allowed = LIVE[LIVE % 5 == 0]
    assert recall(changed, allowed, allowed) >= 0.99
    num_scored = [final(changed, query, 10, allowed).num_scored for query in QUERIES]
    assert max(num_scored) < NUM_VECTORS


FAR = clustered(6000, seed=4)
FAR_ROWS = np.sort(np.argsort(FAR @ FAR[0])[:300])
"""The twentieth of the vectors that is farthest from the query."""


@pytest.fixture(scope="module")
def far(threads: IndexThreads) -> SegmentedIndex:
    index = opened(threads)
    index.load([(np.arange(len(FAR)), FAR)])
    wait_until_built(index)
    return index


def test_a_few_allowed_rows_are_compared_directly(far: SegmentedIndex) -> None:
    found = final(far, FAR[0], 10, FAR_ROWS)
    assert found.num_scored == len(FAR_ROWS)
    assert found.rows == nearest(FAR_ROWS, FAR[FAR_ROWS], FAR[0], 10)


@pytest.mark.parametrize("are_removed", [False, True])
def test_a_walk_that_costs_more_than_direct_comparison_ends(
    far: SegmentedIndex,
    threads: IndexThreads,
    are_removed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With removed rows, the walk is in a region where all rows were removed."""
    rows, index = FAR_ROWS, far
    allowed: Rows | None = FAR_ROWS
    if are_removed:
        index = opened(threads)
        index.load([(np.arange(len(FAR)), FAR)])
        wait_until_built(index)
        monkeypatch.setattr(segmented_index, "MIN_TAIL", len(FAR))  # no merge meanwhile
        index.apply(np.setdiff1d(np.arange(len(FAR)), rows).tolist(), (), NONE)
        allowed = None
    monkeypatch.setattr(segmented_index, "_few", lambda *_: 0)
    stages = list(index.search(FAR[0], 10, allowed=allowed))
    assert [one.final for one in stages] == [False] * (len(stages) - 1) + [True]
    assert stages[-1].rows == nearest(rows, FAR[rows], FAR[0], 10)
    usual = final(far, FAR[0], 10).num_scored
    assert stages[-1].num_scored < 3.5 * usual + len(rows)
    assert stages[-1].num_scored < len(FAR) / 2


def test_stages_advance_and_score_a_small_part(changed: SegmentedIndex) -> None:
    for query in QUERIES:
        stages = list(changed.search(query, 10))
        assert 2 <= len(stages) <= 4
        assert [stage.final for stage in stages] == [False] * (len(stages) - 1) + [True]
        for before, after in itertools.pairwise(stages):
            assert before.progress < after.progress
            assert before.num_scored <= after.num_scored
        assert stages[-1].num_scored < NUM_VECTORS
        assert all(0 <= stage.final_probability <= 1 for stage in stages)


def test_a_cancelled_walk_ends_without_a_final_stage(changed: SegmentedIndex) -> None:
    asked = itertools.count()
    stages = list(changed.search(QUERIES[0], 10, cancelled=lambda: next(asked) > 20))
    assert not any(stage.final for stage in stages)
    assert next(asked) <= 23, "the walk went on"


def test_a_declared_recall_saves_computations_once_searches_are_known(
    threads: IndexThreads,
) -> None:
    index = opened(threads)
    index.load([(np.arange(NUM_VECTORS), VECTORS)])
    wait_until_built(index)
    for query in clustered(300, seed=3):
        final(index, query, 10)
    found, num_scored, num_full = [], 0, 0
    for query in QUERIES:
        stage = list(index.search(query, 10, recall=0.9))[-1]
        full = final(index, query, 10)
        num_scored, num_full = num_scored + stage.num_scored, num_full + full.num_scored
        found.append(len(set(stage.rows) & set(full.rows)) / 10)
    assert num_scored < num_full
    assert np.mean(found) >= 0.85


@pytest.mark.parametrize("precision", ["float32", "sq8"])
def test_a_reopened_graph_gives_the_same_hits(
    threads: IndexThreads, tmp_path: Path, precision: Precision
) -> None:
    index = opened(threads, tmp_path, precision)
    index.load([(np.arange(NUM_VECTORS), VECTORS)])
    wait_until_built(index)
    before = [final(index, query, 10).rows for query in QUERIES]
    index.close()
    again = opened(threads, tmp_path, precision)
    assert again.kind is IndexKind.HNSW
    assert [final(again, query, 10).rows for query in QUERIES] == before
    again.close()


def test_an_empty_graph_has_no_hits(threads: IndexThreads) -> None:
    index = opened(threads)
    assert final(index, QUERIES[0], 3).rows == ()
    add(index, [4], VECTORS[:1])
    assert final(index, QUERIES[0], 3).rows == (4,)


def test_a_graph_takes_over_in_the_background(threads: IndexThreads) -> None:
    options = IndexOptions(IndexKind.FLAT)
    index = SegmentedIndex.open(None, DIMENSION, options, threads)
    index.load([(np.arange(NUM_VECTORS), VECTORS)])
    index.set_kind(IndexKind.HNSW)
    wait_until_built(index)
    assert index.kind is IndexKind.HNSW
    assert recall(index, np.arange(NUM_VECTORS)) >= 0.99


def test_a_load_does_not_wait_for_the_graph(threads: IndexThreads) -> None:
    may_build = threading.Event()
    threads.background.submit(may_build.wait)
    index = opened(threads)
    try:
        index.load([(np.arange(NUM_VECTORS), VECTORS)])
        assert index.kind is IndexKind.FLAT
        assert recall(index, np.arange(NUM_VECTORS)) == 1
        assert index.is_building
        # Another load does not wait for a build that has not begun.
        index.load([(np.arange(2500), VECTORS[:2500])])
        add(index, range(2500, NUM_VECTORS), VECTORS[2500:])
    finally:
        may_build.set()
    wait_until_built(index)
    assert index.kind is IndexKind.HNSW
    assert recall(index, np.arange(NUM_VECTORS)) >= 0.99


def test_a_load_ends_a_build_of_the_former_content(
    threads: IndexThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()
    build = HnswGraph.build

    def held_build(batches: Iterable[Vectors], dimension: int) -> HnswGraph:
        has_begun.set()
        assert may_go_on.wait(30)
        return build(batches, dimension)

    monkeypatch.setattr(HnswGraph, "build", held_build)
    index = opened(threads)
    index.load([(np.arange(2500), VECTORS[:2500])])
    assert has_begun.wait(30)
    other = np.arange(2500) + 5000

    def batches() -> Iterator[tuple[Rows, Vectors]]:
        yield other, VECTORS[:2500]

    loading = threading.Thread(target=index.load, args=(batches(),))
    loading.start()
    may_go_on.set()
    loading.join()
    wait_until_built(index)
    assert index.kind is IndexKind.HNSW
    assert index.rows().tolist() == other.tolist()
