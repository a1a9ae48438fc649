"""The probability of a stage becomes the share of past searches that had their final hits there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.retrieval.stage_counts import (
    EXPLORATION,
    MAX_SEARCHES,
    MIN_SEARCHES,
    StageCounts,
)

FINAL = (1, 2, 3, 4)
HALF = (1, 2, 8, 9)
progresses = st.floats(0, 1, exclude_max=True)


@given(progress=progresses, recall=st.floats(0.01, 1))
def test_without_a_search_either_is_as_likely_and_none_stops(
    progress: float, recall: float
) -> None:
    counts = StageCounts()
    assert counts.probability(progress) == 0.5
    assert not counts.has_recall(progress, recall)


@given(
    searches=st.lists(
        st.lists(st.tuples(progresses, st.sampled_from([FINAL, HALF, ()])), max_size=4)
    ),
    progress=progresses,
)
def test_a_probability_is_in_its_range(
    searches: list[list[tuple[float, tuple[int, ...]]]], progress: float
) -> None:
    counts = StageCounts()
    for stages in searches:
        counts.learn(stages, FINAL)
    assert 0 < counts.probability(progress) < 1


def test_probabilities_are_those_of_the_collection() -> None:
    random = np.random.default_rng(0)
    counts = StageCounts()
    shares = {0.13: 0.3, 0.26: 0.7, 0.51: 0.95}
    for _ in range(1500):
        stages = [
            (progress, FINAL if random.random() < share else HALF)
            for progress, share in shares.items()
        ]
        counts.learn(stages, FINAL)
    for progress, share in shares.items():
        assert counts.probability(progress) == pytest.approx(share, abs=0.05)


def test_the_same_hits_in_another_order_are_not_final() -> None:
    counts = StageCounts()
    for _ in range(100):
        counts.learn([(0.2, FINAL[::-1])], FINAL)
    assert counts.probability(0.2) < 0.02
    assert counts.has_recall(0.2, 0.95)


def test_a_search_without_hits_is_final_at_once() -> None:
    counts = StageCounts()
    for _ in range(100):
        counts.learn([(0.2, ())], ())
    assert counts.probability(0.2) > 0.98
    assert counts.has_recall(0.2, 0.95)


def test_later_searches_count_more() -> None:
    counts = StageCounts()
    for hits in (HALF, FINAL):
        for _ in range(int(3 * MAX_SEARCHES)):
            counts.learn([(0.2, hits)], FINAL)
    assert counts.probability(0.2) > 0.9


def test_a_recall_is_reached_where_past_searches_had_it() -> None:
    counts = StageCounts()
    for _ in range(MIN_SEARCHES - 1):
        counts.learn([(0.13, HALF), (0.5, FINAL)], FINAL)
    assert not counts.has_recall(0.5, 0.5)
    for _ in range(100):
        counts.learn([(0.13, HALF), (0.5, FINAL)], FINAL)
    assert counts.has_recall(0.13, 0.45)
    assert not counts.has_recall(0.13, 0.55)
    assert counts.has_recall(0.5, 0.95)
    assert not counts.has_recall(0.5, 1)
    assert not counts.has_recall(0.9, 0.1), "no search had a stage there"


def test_one_search_with_a_declared_recall_in_many_runs_to_its_end() -> None:
    counts = StageCounts()
    may_stop = [counts.may_stop() for _ in range(10 * EXPLORATION)]
    assert may_stop.count(False) == 10
