"""The probability of a stage becomes the share of such stages that had the final hits."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.retrieval.fused_finality import (
    MAX_FORMS,
    FusedFinalities,
    FusedFinality,
    FusedStage,
    SearchForm,
)

shares = st.floats(0, 1)
stages = st.builds(
    FusedStage,
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    shares,
    shares,
    st.integers(0, 9),
)


@given(stages)
def test_without_experience_the_index_is_believed_and_half_of_the_rest(stage: FusedStage) -> None:
    expected = stage.dense_probability + (1 - stage.dense_probability) / 2
    assert FusedFinality().probability(stage) == pytest.approx(expected)


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


def test_a_kind_without_stages_is_judged_by_others_of_the_same_progress() -> None:
    finality = FusedFinality()
    for _ in range(20):
        finality.learn([FusedStage((1,), 0.01, 0.15, 0)], (1,))
        finality.learn([FusedStage((1,), 0.01, 0.5, 0)], (2,))
    assert finality.probability(FusedStage((1,), 0.3, 0.15, 0)) > 0.95
    assert finality.probability(FusedStage((1,), 0.3, 0.5, 0)) < 0.05


def test_few_searches_are_enough_where_the_index_is_not_sure_of_its_own_hits() -> None:
    finality = FusedFinality()
    claimed = []
    for i in range(40):
        stages = [FusedStage((1,), (0.0, 0.1, 0.5)[j], (0.14, 0.28, 0.56)[j], j) for j in range(3)]
        claimed += [finality.probability(stage) for stage in stages]
        finality.learn(stages, (2,) if i % 20 == 10 else (1,))
    assert np.mean(claimed) == pytest.approx(0.95, abs=0.05)


def test_searches_whose_fused_hits_differ_have_other_forms() -> None:
    forms = {
        SearchForm.of(mode, reranker=reranker, diversity=diversity, top_k=top_k)
        for mode in ("dense", "hybrid")
        for reranker in ("", "cross")
        for diversity in (0.0, 0.3)
        for top_k in (3, 10, 100)
    }
    assert len(forms) == 24
    few = SearchForm.of("hybrid", reranker="cross", diversity=0.1, top_k=8)
    assert few == SearchForm.of("hybrid", reranker="cross", diversity=0.9, top_k=15)


def form_of(top_k: int) -> SearchForm:
    return SearchForm.of("hybrid", reranker="", diversity=0.0, top_k=top_k)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 64), stages, st.booleans())))
def test_counts_survive_as_text(past: list[tuple[int, int, FusedStage, bool]]) -> None:
    finalities = FusedFinalities()
    for generation, top_k, stage, is_final in past:
        finality = finalities.of(generation, form_of(top_k))
        finality.learn([stage], stage.rows if is_final else (-1,))
    restored = FusedFinalities.from_json(finalities.to_json())
    for generation, top_k, stage, _ in past:
        before = finalities.of(generation, form_of(top_k)).probability(stage)
        after = restored.of(generation, form_of(top_k)).probability(stage)
        assert after == pytest.approx(before, abs=1e-3)


def test_the_latest_forms_are_kept() -> None:
    finalities = FusedFinalities()
    stage = FusedStage((1,), 0.1, 0.5, 0)
    for generation in range(MAX_FORMS):
        finalities.of(generation, form_of(5)).learn([stage], (1,))
    finalities.of(0, form_of(5))
    finalities.of(MAX_FORMS, form_of(5))
    restored = FusedFinalities.from_json(finalities.to_json())
    known = [
        generation
        for generation in range(MAX_FORMS)
        if restored.of(generation, form_of(5)).probability(stage) > 0.6
    ]
    assert known[0] == 0
    assert 1 not in known
    assert len(json.loads(restored.to_json())["forms"]) == MAX_FORMS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2),
        ("forms", [{"generation": 1}]),
        ("forms", [{"generation": 1, "form": {"other": 1}, "counts": []}]),
        ("counts", [[0, 0, 0, 1.0, 2.0]]),
        ("counts", [[5, 0, 0, 1.0, 1.0]]),
        ("counts", [[0, 0, 4, 1.0, 1.0]]),
        ("counts", [[0, 0, -1, 1.0, 1.0]]),
        ("counts", [[0, 0, 0, 1e9, 1.0]]),
        ("counts", [[0, 0, 0, float("nan"), 1.0]]),
        ("counts", [[float("inf"), 0, 0, 1.0, 1.0]]),
        ("counts", [[0, 0]]),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(field: str, value: object) -> None:
    finalities = FusedFinalities()
    finalities.of(1, form_of(5)).learn([FusedStage((1,), 0.1, 0.5, 0)], (1,))
    values = json.loads(finalities.to_json())
    (values["forms"][0] if field == "counts" else values)[field] = value
    with pytest.raises(ValueError, match="has no counts"):
        FusedFinalities.from_json(json.dumps(values))


@pytest.mark.parametrize("text", ["", "[]", "7", "{}", '{"version": 1}'])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="has no counts"):
        FusedFinalities.from_json(text)
