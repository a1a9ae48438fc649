"""Chosen weights follow the questions where these show something, and the default elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.retrieval.fusion import (
    DEFAULT_LEXICAL_WEIGHT,
    FusionWeights,
    best_order,
    fused_scores,
    merged_legs,
)
from ragcache_core.retrieval.fusion_tuning import (
    MIN_QUESTIONS,
    JudgedSearch,
    choose_weights,
    ndcg,
    ranker_helps,
)

NUM_HITS = 12


def searches(
    seed: int, dense_noise: float, lexical_noise: float, count: int = 40
) -> list[JudgedSearch]:
    """Return searches whose legs see the relevance of row 0 through noise."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        relevance = np.zeros(NUM_HITS)
        relevance[0] = 1.0
        rows = np.arange(NUM_HITS)
        dense, lexical = (
            2.0 + relevance + noise * random.normal(size=NUM_HITS)
            for noise in (dense_noise, lexical_noise)
        )
        by_dense, by_lexical = np.argsort(-dense), np.argsort(-lexical)
        merged = merged_legs(rows[by_dense], dense[by_dense], rows[by_lexical], lexical[by_lexical])
        found.append(JudgedSearch(merged, {0: 1}))
    return found


def quality(some: list[JudgedSearch], weights: FusionWeights) -> list[float]:
    return [
        ndcg(
            one.candidates.rows[
                best_order(fused_scores(one.candidates, weights), one.candidates)
            ].tolist(),
            one.grades,
        )
        for one in some
    ]


seeds = st.integers(0, 1 << 16)
noises = st.sampled_from([0.0, 0.3, 1.0, 5.0])


@settings(max_examples=10)
@given(seeds, noises, noises)
def test_the_choice_loses_nothing_but_noise_on_its_questions(
    seed: int, dense_noise: float, lexical_noise: float
) -> None:
    some = searches(seed, dense_noise, lexical_noise)
    chosen = np.array(quality(some, choose_weights(some, 0.0)))
    for leg in (FusionWeights().only_dense(), FusionWeights().only_lexical()):
        behind = np.array(quality(some, leg)) - chosen
        assert behind.mean() <= 3 * behind.std(ddof=1) / np.sqrt(len(some)) + 1e-9


@settings(max_examples=5)
@given(seeds)
def test_a_useless_leg_gets_little_weight(seed: int) -> None:
    assert choose_weights(searches(seed, 0.2, 5.0), 0.0).lexical < DEFAULT_LEXICAL_WEIGHT
    assert choose_weights(searches(seed, 5.0, 0.2), 0.0).lexical > DEFAULT_LEXICAL_WEIGHT


@given(seeds)
@settings(max_examples=5)
def test_questions_that_show_nothing_keep_the_default(seed: int) -> None:
    some = [
        JudgedSearch(one.candidates, {-1: 1}) for one in searches(seed, 1.0, 1.0, MIN_QUESTIONS)
    ]
    assert choose_weights(some, 0.1).lexical == DEFAULT_LEXICAL_WEIGHT


def test_too_few_questions_keep_the_default() -> None:
    some = searches(0, 0.2, 5.0, MIN_QUESTIONS - 1)
    assert choose_weights(some, 0.1) == FusionWeights(dense_floor=0.1)


@given(st.permutations(range(6)), st.dictionaries(st.integers(0, 8), st.integers(1, 3), min_size=1))
def test_ndcg_is_a_share_of_the_ideal_order(rows: list[int], grades: dict[int, int]) -> None:
    ideal = sorted(grades, key=lambda row: -grades[row])
    assert 0.0 <= ndcg(rows, grades) <= ndcg(ideal, grades) == pytest.approx(1.0)


def test_ndcg_of_a_known_order() -> None:
    assert ndcg([5, 1], {1: 1}) == pytest.approx(1 / np.log2(3))
    assert ndcg([*range(2, 12), 1], {1: 1}) == 0.0


@given(st.lists(st.floats(0, 1), min_size=MIN_QUESTIONS, max_size=50))
def test_a_ranker_that_changes_nothing_does_not_help(quality: list[float]) -> None:
    assert not ranker_helps(quality, quality)


def test_a_ranker_helps_if_it_gains_more_than_noise() -> None:
    random = np.random.default_rng(0)
    fused = random.random(100)
    better = fused + 0.02 + 0.05 * random.normal(size=100)
    worse = fused - 0.02 + 0.05 * random.normal(size=100)
    assert ranker_helps(fused.tolist(), better.tolist())
    assert not ranker_helps(fused.tolist(), worse.tolist())
    assert not ranker_helps([0.0] * (MIN_QUESTIONS - 1), [1.0] * (MIN_QUESTIONS - 1))
