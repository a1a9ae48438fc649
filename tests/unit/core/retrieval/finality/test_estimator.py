import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.retrieval.finality.estimator import WINDOW_SEARCHES, FinalityEstimator
from ragcache_core.retrieval.finality.features import (
    NUM_INPUTS,
    Observation,
    StageFeatures,
    model_inputs,
    observations,
)

SHARES = st.floats(0.001, 1.0)
SCORES = st.floats(-1.0, 1.0)
COUNTS = st.floats(0, 1e6) | st.just(math.nan)


@st.composite
def features(draw: st.DrawFn) -> StageFeatures:
    progress = draw(SHARES)
    top_k = draw(st.integers(1, 100))
    return StageFeatures(
        progress=progress,
        top_k=top_k,
        kth_score=draw(SCORES),
        best_score=draw(SCORES),
        next_bound=draw(SCORES),
        next_centroid_score=draw(SCORES),
        unchanged=draw(st.floats(0, 1)) * progress,
        num_changes=draw(st.integers(0, top_k)),
        expected_better=draw(COUNTS),
        expected_found=draw(COUNTS),
    )


def searches(num: int, seed: int = 0, hidden: float = 0.5) -> Iterator[list[Observation]]:
    """Return searches. Some of them find their hits early. ``hidden`` shifts how many."""
    draw = np.random.default_rng(seed)
    for _ in range(num):
        ease = draw.random()
        yield [
            observed(progress, ease, draw.random() < hidden**2 + (1 - hidden) * ease * progress)
            for progress in (0.05, 0.1, 0.2, 0.4, 0.8)
        ]


def observed(progress: float, ease: float, is_final: bool) -> Observation:
    seen = StageFeatures(
        progress=progress,
        top_k=10,
        kth_score=0.5 + 0.3 * ease,
        best_score=0.9,
        next_bound=1.0,
        next_centroid_score=0.5,
        unchanged=progress * ease,
        num_changes=0,
    )
    return Observation(seen, bool(is_final), 1.0 if is_final else 0.7)


def learned(num: int, hidden: float = 0.5) -> FinalityEstimator:
    estimator = FinalityEstimator()
    for search in searches(num, hidden=hidden):
        estimator = estimator.learn(search)
    return estimator


LEARNED = learned(64)


@given(features())
@pytest.mark.parametrize("estimator", [FinalityEstimator(), LEARNED])
def test_estimates_are_probabilities_for_any_features(
    estimator: FinalityEstimator, seen: StageFeatures
) -> None:
    assert len(model_inputs(seen)) == NUM_INPUTS
    assert 0 <= estimator.probability(seen) <= 1
    assert 0 <= estimator.expected_recall(seen) <= 1


@given(features())
def test_hits_that_nothing_can_beat_are_final(seen: StageFeatures) -> None:
    proved = replace(seen, kth_score=0.5, next_bound=0.4)
    assert LEARNED.probability(proved) == LEARNED.expected_recall(proved) == 1
    assert LEARNED.probability(replace(seen, progress=1.0)) == 1


def test_learning_leaves_the_estimator_as_it_was() -> None:
    before = FinalityEstimator()
    seen = observed(0.2, 0.5, True).features
    probability = before.probability(seen)
    after = before
    for search in searches(64):
        after = after.learn(search)
    assert before.probability(seen) == probability
    assert before.curve.num_searches == 0
    assert after.probability(seen) != probability


def test_learning_is_deterministic() -> None:
    assert learned(48).to_json() == learned(48).to_json()


def test_an_estimator_becomes_calibrated_where_its_prior_is_wrong() -> None:
    held_out = [one for search in searches(400, seed=1) for one in search]
    outcomes = np.array([one.is_final for one in held_out])

    def error(estimator: FinalityEstimator) -> float:
        predicted = np.array([estimator.probability(one.features) for one in held_out])
        bins = np.minimum((predicted * 10).astype(int), 9)
        return sum(
            abs((predicted - outcomes)[bins == one].sum()) / len(outcomes) for one in range(10)
        )

    assert error(FinalityEstimator()) > 0.2
    assert error(learned(256)) < 0.05


def test_an_estimator_follows_a_change_and_forgets_old_searches() -> None:
    estimator = learned(WINDOW_SEARCHES, hidden=1.0)
    seen = observed(0.2, 0.5, True).features
    assert estimator.probability(seen) > 0.9
    for search in searches(WINDOW_SEARCHES, seed=2, hidden=0.3):
        estimator = estimator.learn(search)
    assert estimator.probability(seen) < 0.5


def test_the_window_is_bounded() -> None:
    many = observed(0.2, 0.5, True)
    estimator = FinalityEstimator()
    for _ in range(WINDOW_SEARCHES + 20):
        estimator = estimator.learn([many] * 1000)
    kept = [len(search.inputs) for search in estimator._searches]
    assert len(kept) == WINDOW_SEARCHES
    assert max(kept) <= 64


def test_a_stored_estimator_predicts_the_same() -> None:
    stored = FinalityEstimator.from_json(LEARNED.to_json())
    seen = observed(0.2, 0.5, True).features
    assert stored.probability(seen) == pytest.approx(LEARNED.probability(seen), abs=1e-4)
    assert stored.expected_recall(seen) == pytest.approx(LEARNED.expected_recall(seen), abs=1e-4)
    assert stored.curve.num_searches == LEARNED.curve.num_searches
    assert FinalityEstimator.from_json(stored.to_json()).to_json() == stored.to_json()


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "null", '{"version": 0}', LEARNED.to_json().replace("[", "[1,", 1)],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no estimator"):
        FinalityEstimator.from_json(text)


def test_observations_compare_with_the_end_of_the_scan() -> None:
    seen = observed(0.2, 0.5, True).features
    history = [(seen, (1, 2)), (seen, (2, 3)), (seen, (3, 2)), (seen, (2, 3))]
    found = observations(history)
    assert [one.is_final for one in found] == [False, True, False]
    assert [one.recall for one in found] == [0.5, 1.0, 1.0]


def test_a_search_without_hits_has_full_recall() -> None:
    seen = observed(0.2, 0.5, True).features
    assert observations([(seen, ()), (seen, ())])[0].recall == 1
    assert observations([]) == []
