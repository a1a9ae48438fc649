"""Fused scores rank as one leg at the extreme weights, and between the legs otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.retrieval.fusion import (
    SCORE_STEP,
    Candidates,
    Position,
    best_order,
    fused_scores,
    merged_legs,
    raised_scores,
    share_of_best,
)

legs = st.dictionaries(st.integers(1, 30), st.floats(0.01, 1.0), max_size=12).map(
    lambda hits: sorted(hits.items(), key=lambda hit: (-hit[1], hit[0]))
)
Leg = list[tuple[int, float]]


def merged(
    dense: Leg, lexical: Leg, num_identifiers: Mapping[int, int] | None = None
) -> Candidates:
    """Return the candidates. ``num_identifiers``: by row of the lexical leg."""
    identifiers = num_identifiers or {}
    return merged_legs(
        np.array([row for row, _ in dense], np.int64),
        np.array([score for _, score in dense], np.float64),
        np.array([row for row, _ in lexical], np.int64),
        np.array([score for _, score in lexical], np.float64),
        np.array([identifiers.get(row, 0) for row, _ in lexical], np.int64),
    )


def by_row(rows: Sequence[int]) -> list[Position]:
    return [("document", row) for row in rows]


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
    order = best_order(fused_scores(candidates, 0.0 if is_dense else 1.0), candidates, by_row)
    scores = candidates.dense if is_dense else candidates.lexical
    leg = dense if is_dense else lexical
    found = scores[order][: len(leg)]
    assert found == pytest.approx([score for _, score in leg], abs=2 * SCORE_STEP)


@given(legs, legs, st.floats(0, 1))
def test_the_best_of_both_legs_is_the_best(dense: Leg, lexical: Leg, weight: float) -> None:
    dense, lexical = [(99, 2.0), *dense], [(99, 2.0), *lexical]
    candidates = merged(dense, lexical)
    order = best_order(fused_scores(candidates, weight), candidates, by_row)
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


@given(legs, legs, st.floats(0, 1), st.dictionaries(st.integers(1, 30), st.integers(0, 2)))
def test_chunks_with_more_identifiers_come_first_with_higher_scores(
    dense: Leg, lexical: Leg, weight: float, num_identifiers: dict[int, int]
) -> None:
    candidates = merged(dense, lexical, num_identifiers)
    fused = fused_scores(candidates, weight)
    order = best_order(fused, candidates, by_row)
    scores = raised_scores(fused, candidates.num_identifiers, most=1.0)
    counts = candidates.num_identifiers[order].tolist()
    assert counts == sorted(counts, reverse=True)
    assert (np.diff(scores[order]) <= SCORE_STEP).all()
    assert ((scores >= 0) & (scores <= 1 + 1e-9)).all()


@given(legs, legs, st.floats(0, 1))
def test_identifiers_of_other_chunks_change_no_score(
    dense: Leg, lexical: Leg, weight: float
) -> None:
    row = lexical[-1][0] if lexical else 0
    without = fused_scores(merged(dense, lexical), weight)
    candidates = merged(dense, lexical, {row: 1})
    others = candidates.rows != row
    scores = fused_scores(candidates, weight)
    raised = raised_scores(scores, candidates.num_identifiers, most=1.0)
    assert raised[others].tolist() == without[others].tolist()


def test_scores_without_a_bound_are_raised_by_the_best_of_the_others() -> None:
    scores = raised_scores(np.array([7.0, 2.0, 3.0, 1.0]), np.array([0, 1, 0, 2]))
    assert scores.tolist() == [7.0, 9.0, 3.0, 10.0]


def test_ties_go_to_the_lower_document_and_ordinal() -> None:
    candidates = merged([(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.9)], [])
    positions = {1: ("b", 0), 2: ("a", 7), 3: ("a", 3)}
    asked: list[int] = []

    def positions_of(rows: Sequence[int]) -> list[Position]:
        asked.extend(rows)
        return [positions[row] for row in rows]

    scores = candidates.dense + np.array([1e-9, 0, 2e-9, 0])
    order = best_order(scores, candidates, positions_of)
    assert candidates.rows[order].tolist() == [4, 3, 2, 1]
    assert sorted(asked) == [1, 2, 3]
