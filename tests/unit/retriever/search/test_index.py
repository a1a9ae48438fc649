"""Staged search against exact search."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_retriever.search.index import (
    IndexStage,
    Probing,
    Rows,
    StagedIndex,
    Vectors,
    stage_ends,
    use_one_thread,
)

DIMENSION = 16
NONE = np.empty((0, DIMENSION), np.float32)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    use_one_thread()


def unit(vectors: np.ndarray) -> Vectors:
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)


def clustered(count: int, seed: int) -> Vectors:
    """Vectors the way texts lie: in clusters, each with its own width."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(max(1, count // 40), DIMENSION))
    widths = rng.uniform(0.2, 0.8, size=(len(centres), 1))
    chosen = rng.integers(0, len(centres), count)
    return unit(centres[chosen] + widths[chosen] * rng.normal(size=(count, DIMENSION)))


def index_of(vectors: Vectors, probing: Probing | None = None) -> StagedIndex:
    return StagedIndex(DIMENSION, np.arange(len(vectors)), vectors, probing or Probing())


def exact(rows: Rows, vectors: Vectors, query: Vectors, top_k: int) -> list[int]:
    scores = vectors @ query
    return [int(rows[i]) for i in np.lexsort((rows, -scores))[:top_k]]


def final(index: StagedIndex, query: Vectors, top_k: int) -> IndexStage:
    return list(index.search(query, top_k))[-1]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 10, 100, 1000])
@pytest.mark.parametrize("top_k", [1, 10, 1000])
def test_the_final_stage_of_a_small_collection_is_exact(count: int, top_k: int) -> None:
    vectors = clustered(count, seed=1)
    index = index_of(vectors)
    for query in clustered(5, seed=2):
        stage = final(index, query, top_k)
        assert list(stage.rows) == exact(np.arange(count), vectors, query, top_k)
        assert stage.scores == pytest.approx((vectors @ query)[list(stage.rows)], abs=1e-5)


@pytest.mark.parametrize("count", [0, 1, 4, 1000])
def test_a_temporary_stage_comes_before_the_final_one(count: int) -> None:
    index = index_of(clustered(count, seed=1))
    stages = list(index.search(clustered(1, seed=2)[0], 5))
    assert len(stages) >= 2
    assert [stage.final for stage in stages] == [False] * (len(stages) - 1) + [True]
    assert stages[-1].progress == 1
    for before, after in itertools.pairwise(stages):
        assert 0 < before.progress <= after.progress
        assert not before.scores or before.scores[0] <= after.scores[0]


def test_the_first_stage_scans_little_and_finds_much() -> None:
    vectors = clustered(4000, seed=1)
    index = index_of(vectors)
    found = 0
    for query in clustered(100, seed=2):
        first, *_, last = index.search(query, 2)
        assert first.progress < 0.3
        found += len(set(first.rows) & set(last.rows))
    assert found / 200 >= 0.8


def test_recall_of_a_collection_too_large_to_scan_whole() -> None:
    vectors = clustered(5000, seed=1)
    index = index_of(vectors, Probing(exact_limit=500, min_share=0.1))
    found = 0
    for query in clustered(100, seed=2):
        wanted = exact(np.arange(5000), vectors, query, 10)
        found += len(set(wanted) & set(final(index, query, 10).rows))
    assert found / 1000 >= 0.9


def test_ties_go_to_the_smaller_row_wherever_they_lie() -> None:
    vectors = clustered(200, seed=1)
    same = np.repeat(vectors[:1], 50, axis=0)
    forwards, backwards = index_of(vectors), index_of(vectors)
    rows = list(range(1000, 1050))
    forwards.replace([], rows, same)
    backwards.replace([], rows[::-1], same)
    for top_k in (1, 5, 30):
        expected = (0, *rows)[:top_k]
        assert final(forwards, vectors[0], top_k).rows == expected
        assert final(backwards, vectors[0], top_k).rows == expected


@given(
    seed=st.integers(0, 1000),
    changes=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), max_size=8),
)
def test_a_changed_index_equals_a_new_one(seed: int, changes: list[tuple[int, int]]) -> None:
    rng = np.random.default_rng(seed)
    held: dict[int, Vectors] = {}
    index = index_of(NONE)
    row = 0
    for num_removed, num_added in changes:
        gone = rng.permutation(list(held))[:num_removed].tolist()
        added = list(range(row, row + num_added))
        row += num_added
        vectors = clustered(num_added, seed=row) if num_added else NONE
        index.replace([*gone, 10**9], added, vectors)
        held = {k: v for k, v in held.items() if k not in gone}
        held |= dict(zip(added, vectors, strict=True))
        if index.outgrown:
            index = index.retrained()
            assert not index.outgrown
        assert len(index) == len(held)
    query = clustered(1, seed=seed)[0]
    rows = np.array(list(held), np.int64)
    vectors = np.array(list(held.values())) if held else NONE
    assert list(final(index, query, 5).rows) == exact(rows, vectors, query, 5)


def test_an_empty_index_grows_cells_as_it_fills() -> None:
    index = index_of(NONE)
    vectors = clustered(100, seed=1)
    index.replace([], range(100), vectors)
    assert index.outgrown
    first = next(iter(index.retrained().search(vectors[0], 1)))
    assert first.progress < 1


@given(sizes=st.lists(st.integers(1, 100), max_size=50))
def test_stages_divide_the_cells(sizes: list[int]) -> None:
    ends = stage_ends(np.cumsum(np.array(sizes, np.int64)))
    assert len(ends) >= 2
    assert ends[-1] == len(sizes)
    assert ends == sorted(ends)
    if len(sizes) >= 2:
        assert len(set(ends)) == len(ends)
        assert ends[0] >= 1
