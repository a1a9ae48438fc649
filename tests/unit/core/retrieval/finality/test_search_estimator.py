"""How often an estimator learns, and how often searches may stop."""

from __future__ import annotations

from ragcache_core.retrieval.finality.search_estimator import SearchEstimator


def test_the_first_searches_are_learned_from_and_then_a_few() -> None:
    estimator = SearchEstimator()
    assert all(estimator.wants_history() for _ in range(256))
    assert sum(estimator.wants_history() for _ in range(1600)) == 100
