"""Fused scores rank as one leg at the extreme weights, and between the legs otherwise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.retrieval.fusion import (
    Candidates,
    best_order,
    fused_scores,
    merged_legs,
    share_of_best,
)

legs = st.dictionaries(st.integers(1, 30), st.floats(0.01, 1.0), max_size=12).map(
    lambda hits: sorted(hits.items(), key=lambda hit: (-hit[1], hit[0]))
)
Leg = list[tuple[int, float]]


def merged(dense: Leg, lexical: Leg) -> Candidates:
    return merged_legs(
        np.array([row for row, _ in dense], np.int64),
        np.array([score for _, score in dense], np.float64),
        np.array([row for row, _ in lexical], np.int64),
        np.array([score for _, score in lexical], np.float64),
    )


@given(legs, legs)
def test_merging_keeps_each_hit_of_each_leg(dense: Leg, lexical: Leg) -> None:
    candidates = merged(dense, lexical)
    assert candidates.rows.tolist() == sorted({row for row, _ in dense + lexical})
    for i, row in enumerate(candidates.rows.tolist()):
        for leg, scores, ranks in (
            (dense, candidates.dense, candidates.dense_ranks),
            (lexical, candidates.lexical, candidates.lexical_ranks),
        ):
            if row in dict(leg):
                assert leg[ranks[i] - 1] == (row, scores[i])
            else:
                assert np.isnan(scores[i])
                assert ranks[i] == 0


@given(legs, legs, st.booleans())
def test_an_extreme_weight_ranks_as_one_leg(dense: Leg, lexical: Leg, is_dense: bool) -> None:
    candidates = merged(dense, lexical)
    order = best_order(fused_scores(candidates, 0.0 if is_dense else 1.0), candidates)
    scores = candidates.dense if is_dense else candidates.lexical
    leg = dense if is_dense else lexical
    found = scores[order][: len(leg)]
    assert found.tolist() == [score for _, score in leg]


@given(legs, legs, st.floats(0, 1))
def test_the_best_of_both_legs_is_the_best(dense: Leg, lexical: Leg, weight: float) -> None:
    dense, lexical = [(99, 2.0), *dense], [(99, 2.0), *lexical]
    candidates = merged(dense, lexical)
    order = best_order(fused_scores(candidates, weight), candidates)
    assert candidates.rows[order[0]] == 99


@given(legs, legs, st.floats(0, 1), st.floats(1e-3, 1e3))
def test_the_scale_of_a_leg_does_not_matter(
    dense: Leg, lexical: Leg, weight: float, scale: float
) -> None:
    once = fused_scores(merged(dense, lexical), weight)
    scaled = [(row, scale * score) for row, score in lexical]
    assert fused_scores(merged(dense, scaled), weight) == pytest.approx(once)


def test_shares_of_nothing_are_zero() -> None:
    assert share_of_best(np.array([np.nan, -1.0])).tolist() == [0.0, 0.0]
    assert share_of_best(np.empty(0)).tolist() == []
