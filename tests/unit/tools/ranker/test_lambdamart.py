"""Training orders candidates by what makes them relevant, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.retrieval.boosted_trees import trees_to_text
from ragcache_core.retrieval.fusion_tuning import ndcg
from tools.ranker.lambdamart import TrainingGroup, TrainingOptions, lambdas, train

NAMES = ("signal", "noise", "reversed")
OPTIONS = TrainingOptions(num_trees=20, depth=2, learning_rate=0.2)


def groups(seed: int, count: int) -> list[TrainingGroup]:
    """Return groups in which a high signal is relevant and a high last feature is not."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        features = random.normal(size=(20, 3))
        grades = (features[:, 0] > 1.0).astype(np.float64)
        features[:, 2] = -features[:, 0]
        found.append(TrainingGroup(features, grades, random.normal(size=20) / 10))
    return found


def quality(some: list[TrainingGroup], scores: list[np.ndarray]) -> float:
    return float(
        np.mean(
            [
                ndcg(
                    np.argsort(-score, kind="stable").tolist(),
                    dict.fromkeys(np.flatnonzero(group.grades).tolist(), 1),
                )
                for group, score in zip(some, scores, strict=True)
            ]
        )
    )


def test_trained_trees_order_groups_that_they_have_not_seen() -> None:
    trees = train(groups(0, 60), NAMES, OPTIONS, {})
    unseen = [group for group in groups(1, 40) if group.grades.any()]
    before = quality(unseen, [group.base_scores for group in unseen])
    after = quality(unseen, [group.base_scores + trees.scores(group.features) for group in unseen])
    assert before < 0.6
    assert after > 0.95


def test_training_is_repeatable() -> None:
    once, again = (train(groups(0, 10), NAMES, OPTIONS, {}) for _ in range(2))
    assert trees_to_text(once) == trees_to_text(again)


def test_scores_only_rise_with_a_feature() -> None:
    trees = train(groups(0, 60), NAMES, TrainingOptions(num_trees=20, depth=1), {})
    assert 2 not in trees.split_features[trees.leaf_values[:, 0] != trees.leaf_values[:, 1]]
    line = np.zeros((50, 3))
    line[:, 0] = np.linspace(-3, 3, 50)
    assert (np.diff(trees.scores(line)) >= 0).all()


@settings(max_examples=30)
@given(st.integers(0, 1 << 16))
def test_lambdas_push_relevant_candidates_up(seed: int) -> None:
    random = np.random.default_rng(seed)
    grades = random.integers(0, 3, 12).astype(np.float64)
    grades[0], grades[1] = 0.0, 2.0
    gradients, weights = lambdas(random.normal(size=12), grades)
    assert gradients.sum() == pytest.approx(0.0, abs=1e-9)
    assert (weights >= 0).all()
    assert (gradients[grades == 0] <= 1e-12).all()
    assert (gradients[grades == 2] >= -1e-12).all()
