"""Diversity weighs the difference from better hits against the score."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.retrieval.diversity import Scores, Vectors, diverse_order


def hits(seed: int, count: int) -> tuple[Scores, Vectors]:
    random = np.random.default_rng(seed)
    vectors = random.normal(size=(count, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.sort(random.random(count))[::-1], vectors


seeds = st.integers(0, 1 << 16)
counts = st.integers(0, 20)
shares = st.floats(0, 1)


@given(seeds, counts, shares, st.integers(1, 25))
def test_each_hit_is_taken_once_up_to_the_limit(
    seed: int, count: int, diversity: float, limit: int
) -> None:
    order = diverse_order(*hits(seed, count), diversity, limit)
    assert len(order) == len(set(order)) == min(count, limit)


@given(seeds, counts, st.integers(1, 25))
def test_without_diversity_the_order_stays(seed: int, count: int, limit: int) -> None:
    assert diverse_order(*hits(seed, count), 0.0, limit) == list(range(min(count, limit)))


@given(seeds, st.integers(1, 20), shares)
def test_the_best_hit_stays_first(seed: int, count: int, diversity: float) -> None:
    assert diverse_order(*hits(seed, count), diversity, count)[0] == 0


@given(seeds, st.integers(2, 20), shares, st.integers(1, 20))
def test_a_shorter_list_is_the_beginning_of_a_longer_one(
    seed: int, count: int, diversity: float, limit: int
) -> None:
    scores, vectors = hits(seed, count)
    longer = diverse_order(scores, vectors, diversity, count)
    assert diverse_order(scores, vectors, diversity, limit) == longer[:limit]


@given(seeds, st.integers(3, 20))
def test_full_diversity_takes_what_is_farthest_from_the_taken(seed: int, count: int) -> None:
    scores, vectors = hits(seed, count)
    order = diverse_order(scores, vectors, 1.0, count)
    for i in range(1, count):
        nearest = (vectors @ vectors[order[:i]].T).max(axis=1)
        assert nearest[order[i]] <= nearest[order[i:]].min() + 1e-6


def test_a_copy_of_the_best_hit_goes_behind_another_hit() -> None:
    vectors = np.array([[1, 0], [1, 0], [0, 1]], np.float32)
    scores = np.array([1.0, 0.99, 0.6])
    assert diverse_order(scores, vectors, 0.0, 3) == [0, 1, 2]
    assert diverse_order(scores, vectors, 0.6, 3) == [0, 2, 1]
