"""The quality of an order is a share of that of the best order."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.support.retrieval.ndcg import ndcg


@given(st.permutations(range(6)), st.dictionaries(st.integers(0, 8), st.integers(1, 3), min_size=1))
def test_ndcg_is_a_share_of_the_ideal_order(rows: list[int], grades: dict[int, int]) -> None:
    ideal = sorted(grades, key=lambda row: -grades[row])
    assert 0.0 <= ndcg(rows, grades) <= ndcg(ideal, grades) == pytest.approx(1.0)


def test_ndcg_of_a_known_order() -> None:
    assert ndcg([5, 1], {1: 1}) == pytest.approx(1 / math.log2(3))
    assert ndcg([*range(2, 12), 1], {1: 1}) == 0.0
