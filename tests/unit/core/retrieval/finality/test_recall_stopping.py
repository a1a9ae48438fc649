import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.retrieval.finality.features import StageFeatures
from ragcache_core.retrieval.finality.recall_stopping import (
    EXPLORATION,
    MIN_SEARCHES,
    replay,
)
from ragcache_core.retrieval.finality.search_estimator import SearchEstimator

Searches = list[list[tuple[float, float]]]

SHARES = st.floats(0, 1, width=32)
SEARCHES = st.lists(
    st.lists(st.tuples(SHARES, SHARES), min_size=1, max_size=5),
    min_size=MIN_SEARCHES,
    max_size=MIN_SEARCHES + 5,
)


def mean_recall(searches: Searches, threshold: float) -> float:
    """Return the mean recall of searches that stop where the expected recall is reached."""
    return float(
        np.mean(
            [
                next((actual for guess, actual in search if guess >= threshold), 1)
                for search in searches
            ]
        )
    )


@given(SEARCHES, st.floats(0.1, 0.99))
def test_replayed_searches_reach_the_declared_recall_at_the_threshold(
    searches: Searches, declared: float
) -> None:
    curve = replay([tuple(np.array(search).T) for search in searches])
    threshold = curve.threshold(declared)
    if threshold is not None:
        assert mean_recall(searches, threshold) >= declared


@given(SEARCHES)
def test_a_higher_recall_has_no_lower_threshold(searches: Searches) -> None:
    curve = replay([tuple(np.array(search).T) for search in searches])
    thresholds = [curve.threshold(recall) for recall in (0.5, 0.9, 0.99)]
    known = [2.0 if one is None else one for one in thresholds]
    assert known == sorted(known)


def test_estimates_that_are_too_high_get_a_margin() -> None:
    draw = np.random.default_rng(0)
    recalls = np.sort(draw.random((200, 6)), axis=1)
    curve = replay([(np.minimum(1, one + 0.1), one) for one in recalls])
    honest = replay([(one, one) for one in recalls])
    with_margin, without = curve.threshold(0.9), honest.threshold(0.9)
    assert with_margin is not None
    assert without is not None
    assert with_margin > without


def test_few_searches_allow_no_stop() -> None:
    one = (np.array([1.0]), np.array([1.0]))
    assert replay([one] * (MIN_SEARCHES - 1)).threshold(0.5) is None
    assert replay([one] * MIN_SEARCHES).threshold(0.5) is not None
    assert replay([one] * MIN_SEARCHES).threshold(1.0) is None
    assert replay([]).threshold(0.5) is None


def history(steps: int = 4) -> list[tuple[StageFeatures, tuple[int, ...]]]:
    """A search that has its hits at the first checkpoint."""
    return [(seen((i + 1) / steps), (1, 2)) for i in range(steps)]


def seen(progress: float) -> StageFeatures:
    return StageFeatures(
        progress=progress,
        top_k=2,
        kth_score=0.5,
        best_score=0.9,
        next_bound=1.0,
        next_centroid_score=0.3,
        unchanged=progress / 2,
        num_changes=0,
    )


def test_the_first_searches_and_then_one_in_32_run_to_the_end() -> None:
    estimator = SearchEstimator()
    assert not any(estimator.may_stop() for _ in range(2 * EXPLORATION))
    for _ in range(2 * MIN_SEARCHES):
        estimator.learn(history())
    allowed = [estimator.may_stop() for _ in range(10 * EXPLORATION)]
    assert allowed.count(False) == 10


def test_a_search_stops_once_its_recall_is_expected() -> None:
    estimator = SearchEstimator()
    assert not estimator.should_stop(seen(0.25), 0.9)
    for _ in range(2 * MIN_SEARCHES):
        estimator.learn(history())
    assert estimator.should_stop(seen(0.25), 0.9)
    assert not estimator.should_stop(seen(0.25), 1.0)
    restored = SearchEstimator.from_json(estimator.to_json())
    assert restored.should_stop(seen(0.25), 0.9)
    assert restored.may_stop()


def test_threads_learn_and_ask_at_the_same_time() -> None:
    estimator = SearchEstimator()

    def work() -> None:
        for _ in range(40):
            estimator.learn(history())
            assert 0 <= estimator.probability(seen(0.25)) <= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    estimator.to_json()
    assert estimator.expected_recall(seen(0.25)) > 0.9
