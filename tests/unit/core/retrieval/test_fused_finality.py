"""The probability of a stage becomes the share of such stages that had the final hits."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.retrieval.fused_finality import FusedFinality, FusedStage, SearchForm

shares = st.floats(0, 1)
stages = st.builds(
    FusedStage,
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    shares,
    shares,
    st.integers(0, 9),
)


@given(stages)
def test_without_experience_the_index_is_believed(stage: FusedStage) -> None:
    assert abs(FusedFinality().probability(stage) - stage.dense_probability) < 1e-12


@given(st.lists(st.tuples(stages, st.booleans())), stages)
def test_a_probability_is_in_its_range(
    past: list[tuple[FusedStage, bool]], stage: FusedStage
) -> None:
    finality = FusedFinality()
    for one, is_final in past:
        finality.learn([one], one.rows if is_final else (-1,))
    assert 0.0 <= finality.probability(stage) <= 1.0


def test_probabilities_are_calibrated_where_the_index_is_not() -> None:
    random = np.random.default_rng(0)
    finality = FusedFinality()
    claimed, happened = [], []
    for i in range(4000):
        num_repeats = int(random.integers(0, 3))
        stage = FusedStage((1,), 0.05, 0.5, num_repeats)
        is_final = random.random() < (0.3, 0.7, 0.95)[num_repeats]
        if i >= 1000:
            claimed.append(finality.probability(stage))
            happened.append(is_final)
        finality.learn([stage], (1,) if is_final else (2,))
    bins = (np.array(claimed) * 10).astype(int)
    error = sum(
        abs(np.array(claimed)[bins == i].mean() - np.array(happened)[bins == i].mean())
        * (bins == i).mean()
        for i in set(bins.tolist())
    )
    assert error < 0.05
    assert max(claimed) > 0.9


def test_searches_whose_fused_hits_differ_have_other_forms() -> None:
    forms = {
        SearchForm.of(mode, reranks=reranks, diversity=diversity, top_k=top_k)
        for mode in ("dense", "hybrid")
        for reranks in (False, True)
        for diversity in (0.0, 0.3)
        for top_k in (3, 10, 100)
    }
    assert len(forms) == 24
    few = SearchForm.of("hybrid", reranks=True, diversity=0.1, top_k=8)
    assert few == SearchForm.of("hybrid", reranks=True, diversity=0.9, top_k=15)
