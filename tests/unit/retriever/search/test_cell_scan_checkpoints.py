"""Checkpoints of searches, and what an estimator learns from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.support.staged.clustered_vectors import (
    DIMENSION,
    draw_queries,
    draw_vectors,
    make_clusters,
)
from ragcache_core.retrieval.finality.estimator import FinalityEstimator
from ragcache_core.retrieval.finality.features import History, StageFeatures, observations
from ragcache_core.retrieval.finality.search_estimator import SearchEstimator
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.search.cell_base import Probing
from ragcache_retriever.search.cell_build import BuildOptions, build_cell_base
from ragcache_retriever.search.cell_scan import CellScan, Query, checkpoints, stage_ends
from ragcache_retriever.search.files.spool import SpooledSource
from ragcache_retriever.search.index_view import IndexView, Tail
from ragcache_retriever.search.scan_pool import scan_together

NUM_VECTORS = 8000
TOP_K = 5


class RecordingEstimator(SearchEstimator):
    """Remembers the complete searches from which an estimator would learn."""

    def __init__(self) -> None:
        super().__init__()
        self.histories: list[History] = []

    def probability(self, features: StageFeatures) -> float:
        return 0.5

    def may_stop(self) -> bool:
        return False

    def wants_history(self) -> bool:
        return True

    def learn(self, history: History) -> None:
        self.histories.append(list(history))


def never() -> bool:
    return False


@pytest.fixture(scope="module")
def histories() -> list[History]:
    """Checkpoints of complete searches of clustered vectors."""
    draw = np.random.default_rng(3)
    clusters = make_clusters(NUM_VECTORS, draw)
    vectors = draw_vectors(clusters, NUM_VECTORS, draw)
    base = build_cell_base(
        SpooledSource(np.arange(NUM_VECTORS), vectors), DIMENSION, BuildOptions(IndexKind.IVF)
    )
    view = IndexView(base, None, Tail.empty(DIMENSION))
    recorded = RecordingEstimator()
    for vector in draw_queries(clusters, vectors, 450, draw):
        query = Query(vector, TOP_K, None, None, never)
        scan_together([CellScan(view, query, Probing(0, 0.5), recorded, lambda stage: None)])
    return recorded.histories


@given(st.lists(st.integers(1, 1000), max_size=200))
def test_checkpoints_grow_and_end_with_the_scan(sizes: list[int]) -> None:
    scanned = np.cumsum(np.array(sizes, np.int64))
    ends = checkpoints(scanned)
    assert ends[-1] == len(sizes)
    assert ends == sorted(set(ends))
    if len(sizes) > 1:
        assert ends[0] == 1
    assert stage_ends(scanned, ends) <= set(ends)
    assert len(ends) - 1 in [ends.index(one) for one in stage_ends(scanned, ends)]


def test_bounds_hold_and_expectations_fall(histories: list[History]) -> None:
    for history in histories[:100]:
        final = set(history[-1][1])
        for features, rows in history:
            if features.is_provably_final:
                assert set(rows) == final
        better = [features.expected_better for features, _ in history]
        assert better[-1] == 0
        assert better[0] >= better[len(better) // 2] >= 0


def test_searches_with_more_expected_vectors_find_more_later(histories: list[History]) -> None:
    early = [history[min(2, len(history) - 1)] for history in histories]
    expected = np.array([features.expected_better for features, _ in early])
    came = np.array(
        [
            len(set(history[-1][1]) - set(rows))
            for history, (_, rows) in zip(histories, early, strict=True)
        ]
    )
    has_more = expected > np.median(expected)
    assert came[has_more].mean() > 1.5 * came[~has_more].mean()


def test_probabilities_are_calibrated_after_a_few_hundred_searches(
    histories: list[History],
) -> None:
    estimator = FinalityEstimator()
    for history in histories[:250]:
        estimator = estimator.learn(observations(history))
    held_out = [one for history in histories[250:] for one in observations(history)]
    predicted = np.array([estimator.probability(one.features) for one in held_out])
    outcomes = np.array([one.is_final for one in held_out])
    bins = np.minimum((predicted * 10).astype(int), 9)
    error = sum(abs((predicted - outcomes)[bins == one].sum()) for one in range(10))
    assert error / len(outcomes) < 0.05
    assert np.mean((predicted - outcomes) ** 2) < 0.5 * outcomes.var()


def test_searches_that_stop_for_a_recall_reach_it_on_average(histories: list[History]) -> None:
    estimator = FinalityEstimator()
    for history in histories[:250]:
        estimator = estimator.learn(observations(history))
    recalls, scanned = [], []
    for history in histories[250:]:
        stop = next(
            (one for one in observations(history) if estimator.may_stop_at(one.features, 0.9)),
            None,
        )
        recalls.append(1.0 if stop is None else stop.recall)
        scanned.append(1.0 if stop is None else stop.features.progress)
    assert np.mean(recalls) > 0.88
    assert np.mean(scanned) < 0.5
