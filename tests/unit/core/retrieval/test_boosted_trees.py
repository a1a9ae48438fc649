"""Trees score each candidate as a walk from their roots to leaves does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.boosted_trees import BoostedTrees, trees_from_text, trees_to_text


def random_trees(seed: int, num_trees: int, depth: int) -> BoostedTrees:
    random = np.random.default_rng(seed)
    shape = num_trees, 2**depth - 1
    return BoostedTrees(
        ("a", "b", "c"),
        random.integers(0, 3, shape),
        random.normal(size=shape).round(3),
        random.normal(size=(num_trees, 2**depth)).round(4),
        {"seed": seed},
    )


def walked(trees: BoostedTrees, features: list[float]) -> float:
    total = 0.0
    for columns, thresholds, values in zip(
        trees.split_features, trees.thresholds, trees.leaf_values, strict=True
    ):
        node = 0
        while node < len(columns):
            node = 2 * node + (2 if features[columns[node]] > thresholds[node] else 1)
        total += values[node - len(columns)]
    return total


shapes = st.tuples(st.integers(0, 1 << 16), st.integers(1, 6), st.integers(0, 4))


@given(shapes, st.lists(st.tuples(*[st.floats(-3, 3)] * 3), max_size=5))
def test_scores_are_sums_of_leaves(
    shape: tuple[int, int, int], rows: list[tuple[float, ...]]
) -> None:
    trees = random_trees(*shape)
    scores = trees.scores(np.array(rows, np.float64).reshape(-1, 3))
    assert scores.tolist() == pytest.approx([walked(trees, list(row)) for row in rows])


@given(shapes)
def test_trees_survive_their_text(shape: tuple[int, int, int]) -> None:
    trees = random_trees(*shape)
    read = trees_from_text(trees_to_text(trees))
    assert read.feature_names == trees.feature_names
    assert read.provenance == trees.provenance
    features = np.random.default_rng(0).normal(size=(8, 3))
    assert read.scores(features).tolist() == trees.scores(features).tolist()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 0, "provenance": {}, "features": ["a"], "trees": [[[0], [0], [1, 2]]]}',
        '{"format": 1, "provenance": {}, "features": ["a"], "trees": []}',
        '{"format": 1, "provenance": {}, "features": ["a"], "trees": [[[1], [0], [1, 2]]]}',
        '{"format": 1, "provenance": {}, "features": ["a"], "trees": [[[0], [0, 1], [1, 2]]]}',
        '{"format": 1, "provenance": {}, "features": ["a"], "trees": [[[0, 0], [0, 0], [1, 2, 3]]]}',  # noqa: E501
    ],
)
def test_a_text_that_holds_no_trees_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        trees_from_text(text)
