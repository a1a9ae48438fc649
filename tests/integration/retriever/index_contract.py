"""What every vector index has to do. A module that runs it has a fixture ``harness``."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import pytest

from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.search.vector_index import IndexStage, RowIndex, Rows, Vectors

DIMENSION = 32
NUM_ROWS = 1500
NUM_CLUSTERS = 12
TOP_K = 8
MIN_RECALL = {IndexKind.FLAT: 1.0, IndexKind.IVF: 1.0, IndexKind.HNSW: 0.95}
"""Of searches in these vectors. The cells that a search of IVF plans hold all of them."""


class IndexHarness(Protocol):
    """An index whose content a test changes."""

    @property
    def index(self) -> RowIndex:
        """The index."""

    @property
    def wanted(self) -> IndexKind:
        """Its kind."""

    def change(self, removed: Sequence[int], added: Sequence[int], vectors: Vectors) -> None:
        """Change the documents, and apply the change to the index."""

    def build(self) -> None:
        """Wait until the index has the wanted kind."""

    def reopened(self) -> RowIndex:
        """Open the index again, as another process would."""


def clustered(num_rows: int, seed: int) -> Vectors:
    """Return vectors of length 1 around some centers."""
    # The centers are the same for all seeds.
    centers = np.random.default_rng(7).normal(size=(NUM_CLUSTERS, DIMENSION))
    random = np.random.default_rng(seed)
    vectors = centers[random.integers(0, NUM_CLUSTERS, num_rows)]
    vectors = vectors + 0.6 * random.normal(size=vectors.shape)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


ROWS: Rows = np.arange(1, NUM_ROWS + 1)
VECTORS = clustered(NUM_ROWS, 1)
QUERIES = clustered(20, 2)


def best(query: Vectors, rows: Rows = ROWS, vectors: Vectors = VECTORS) -> list[int]:
    order = np.lexsort((rows, -(vectors @ query)))
    return [int(row) for row in rows[order[:TOP_K]]]


def last(stages: Sequence[IndexStage]) -> IndexStage:
    return stages[-1]


class IndexContract:
    """Searches of an index with ROWS and VECTORS."""

    def test_complete_searches_find_what_brute_force_finds(self, harness: IndexHarness) -> None:
        num_found = 0
        for query in QUERIES:
            found = last(list(harness.index.search(query, TOP_K)))
            num_found += len(set(found.rows) & set(best(query)))
            exact = VECTORS[np.array(found.rows) - 1] @ query
            assert np.allclose(found.scores, exact, atol=1e-4)
        assert num_found >= MIN_RECALL[harness.wanted] * TOP_K * len(QUERIES)
        assert len(harness.index) == NUM_ROWS
        assert harness.index.rows().tolist() == ROWS.tolist()
        assert harness.index.kind is harness.wanted

    def test_stages_go_on_until_the_last_one(self, harness: IndexHarness) -> None:
        for query in QUERIES[:5]:
            stages = list(harness.index.search(query, TOP_K))
            assert [stage.final for stage in stages] == [False] * (len(stages) - 1) + [True]
            assert last(stages).progress == pytest.approx(1)
            assert last(stages).final_probability == 1
            for earlier, later in itertools.pairwise(stages):
                assert 0 < earlier.progress <= later.progress
                assert earlier.num_scored <= later.num_scored
                assert 0 <= earlier.final_probability <= 1
            for stage in stages:
                hits = list(zip(stage.rows, stage.scores, strict=True))
                assert hits == sorted(hits, key=lambda hit: (-hit[1], hit[0]))
                assert len(set(stage.rows)) == len(stage.rows) <= TOP_K

    def test_more_hits_than_rows_are_all_rows(self, harness: IndexHarness) -> None:
        allowed = ROWS[:3]
        found = last(list(harness.index.search(QUERIES[0], TOP_K, allowed=allowed)))
        assert sorted(found.rows) == allowed.tolist()

    @pytest.mark.parametrize("step", [1, 2, 7, 300])
    def test_only_allowed_rows_are_found(self, harness: IndexHarness, step: int) -> None:
        allowed = ROWS[::step]
        num_found = num_wanted = 0
        for query in QUERIES[:8]:
            for stage in harness.index.search(query, TOP_K, allowed=allowed):
                assert set(stage.rows) <= set(allowed.tolist())
            wanted = best(query, allowed, VECTORS[::step])
            num_found += len(set(stage.rows) & set(wanted))
            num_wanted += len(wanted)
        assert num_found >= MIN_RECALL[harness.wanted] * num_wanted

    def test_no_allowed_row_means_no_hit(self, harness: IndexHarness) -> None:
        stages = list(harness.index.search(QUERIES[0], TOP_K, allowed=ROWS[:0]))
        assert (last(stages).rows, last(stages).final) == ((), True)

    def test_a_declared_recall_is_kept(self, harness: IndexHarness) -> None:
        num_found = 0
        for query in clustered(60, 3):
            found = last(list(harness.index.search(query, TOP_K, recall=0.9)))
            assert found.final
            num_found += len(set(found.rows) & set(best(query)))
        assert num_found >= 0.85 * TOP_K * 60

    def test_a_cancelled_search_has_no_final_stage(self, harness: IndexHarness) -> None:
        assert list(harness.index.search(QUERIES[0], TOP_K, cancelled=lambda: True)) == []
        num_asked = 0

        def cancelled() -> bool:
            nonlocal num_asked
            num_asked += 1
            return num_asked > 1

        stages = list(harness.index.search(QUERIES[0], TOP_K, cancelled=cancelled))
        assert num_asked < 2 or not any(stage.final for stage in stages)
        assert last(list(harness.index.search(QUERIES[0], TOP_K))).final

    def test_an_abandoned_search_holds_nothing(self, harness: IndexHarness) -> None:
        for _ in range(40):
            stages = harness.index.search(QUERIES[0], TOP_K)
            next(stages)
            stages.close()  # type: ignore[attr-defined]
        assert last(list(harness.index.search(QUERIES[0], TOP_K))).final


class ChangesContract:
    """Changes of an index with ROWS and VECTORS."""

    def test_changes_are_seen_at_once(self, harness: IndexHarness) -> None:
        query = QUERIES[0]
        removed = best(query)[:3]
        newer = NUM_ROWS + 1
        harness.change([*removed, 10**9], [newer], query[np.newaxis])
        found = last(list(harness.index.search(query, TOP_K)))
        assert found.rows[0] == newer
        assert found.scores[0] == pytest.approx(1, abs=1e-4)
        assert not set(found.rows) & set(removed)
        assert len(harness.index) == NUM_ROWS - 3 + 1
        harness.change([newer], [], np.empty((0, DIMENSION), np.float32))
        assert newer not in last(list(harness.index.search(query, TOP_K))).rows
        harness.change([], removed, VECTORS[np.array(removed) - 1])
        again = last(list(harness.index.search(query, TOP_K)))
        assert set(again.rows) >= set(removed)

    def test_a_reopened_index_has_the_same_rows(self, harness: IndexHarness) -> None:
        harness.change([1], [NUM_ROWS + 1], clustered(1, 9))
        again = harness.reopened()
        assert again.rows().tolist() == [*range(2, NUM_ROWS + 2)]
        assert last(list(again.search(QUERIES[1], TOP_K))).final

    def test_searches_during_changes_see_no_removed_row(self, harness: IndexHarness) -> None:
        is_over = threading.Event()
        removed: set[int] = set()

        def search(query: Vectors) -> int:
            num_searches = 0
            while not is_over.is_set() or not num_searches:
                gone = set(removed)
                stages = list(harness.index.search(query, TOP_K))
                assert stages[-1].final
                assert not set(stages[-1].rows) & gone
                num_searches += 1
            return num_searches

        with ThreadPoolExecutor(3) as pool:
            searching = [pool.submit(search, query) for query in QUERIES[:3]]
            try:
                for i in range(25):
                    old = [1 + 4 * i + j for j in range(4)]
                    new = [NUM_ROWS + row for row in old]
                    harness.change(old, new, VECTORS[np.array(old) - 1])
                    removed.update(old)
            finally:
                is_over.set()
            assert all(one.result(60) for one in searching)
        assert len(harness.index) == NUM_ROWS
