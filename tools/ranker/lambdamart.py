"""LambdaMART in numpy: boosted trees that are trained to order candidates by nDCG.

Trees are complete and grow level by level. Features are compared at quantiles. Nothing is random,
so the same input gives the same trees.

Source: Burges, From RankNet to LambdaRank to LambdaMART: an overview (2010), section 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ragcache_core.retrieval.boosted_trees import BoostedTrees

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

DEPTH_OF_NDCG = 10


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How trees are trained.

    Attributes:
        learning_rate: Share of each tree's values that is added.
        min_leaf_weight: Least sum of second derivatives in a leaf.
        leaf_penalty: Added to the second derivatives of a leaf (L2).
        num_bins: Quantiles at which a feature may be compared.
    """

    num_trees: int = 120
    depth: int = 3
    learning_rate: float = 0.05
    min_leaf_weight: float = 2.0
    leaf_penalty: float = 5.0
    num_bins: int = 32


@dataclass(frozen=True, slots=True, eq=False)
class TrainingGroup:
    """The candidates of one question.

    Attributes:
        features: Shape (n, features).
        grades: Shape (n,), 0 for a candidate that does not answer the question.
        base_scores: Shape (n,). The trees are trained to correct them.
    """

    features: Floats
    grades: Floats
    base_scores: Floats


def train(
    groups: Sequence[TrainingGroup],
    feature_names: Sequence[str],
    options: TrainingOptions,
    provenance: Mapping[str, Any],
) -> BoostedTrees:
    """Return trees whose values, added to the base scores, order the candidates of each group.

    Args:
        groups: Those without a relevant candidate, or with only such ones, teach nothing.
    """
    groups = [group for group in groups if 0 < np.count_nonzero(group.grades) < len(group.grades)]
    features = np.concatenate([group.features for group in groups])
    borders = _borders(features, options.num_bins)
    bins = np.stack(
        [
            np.searchsorted(border, column)
            for border, column in zip(borders, features.T, strict=True)
        ]
    )
    starts = np.cumsum([0] + [len(group.grades) for group in groups])
    scores = np.concatenate([group.base_scores for group in groups])
    trees = []
    for _ in range(options.num_trees):
        gradients, weights = np.zeros((2, len(scores)))
        for group, start, end in zip(groups, starts[:-1], starts[1:], strict=True):
            gradients[start:end], weights[start:end] = lambdas(scores[start:end], group.grades)
        tree, leaves = _tree(bins, gradients, weights, options)
        scores += tree[2][leaves]
        trees.append(tree)
    columns, cuts, values = (np.stack(parts) for parts in zip(*trees, strict=True))
    thresholds = np.array(
        [
            [
                borders[column][cut] if cut < len(borders[column]) else np.finfo(np.float64).max
                for column, cut in zip(tree_columns, tree_cuts, strict=True)
            ]
            for tree_columns, tree_cuts in zip(columns.tolist(), cuts.tolist(), strict=True)
        ]
    )
    return BoostedTrees(
        tuple(feature_names),
        columns.astype(np.int64),
        np.array([[float(f"{cut:.6g}") for cut in row] for row in thresholds]),
        values.round(6),
        provenance,
    )


def lambdas(scores: Floats, grades: Floats) -> tuple[Floats, Floats]:
    """Return first and second derivatives of the pairwise loss, weighted by the change of nDCG.

    Args:
        scores: Shape (n,).
        grades: Shape (n,), at least one above 0.
    """
    ranks = np.empty(len(scores), np.int64)
    ranks[np.argsort(-scores, kind="stable")] = np.arange(len(scores))
    discounts = np.where(ranks < DEPTH_OF_NDCG, 1.0 / np.log2(ranks + 2.0), 0.0)
    gains = 2.0**grades - 1.0
    best = np.sort(gains)[::-1][:DEPTH_OF_NDCG]
    ideal = float((best / np.log2(np.arange(len(best)) + 2.0)).sum())
    better, worse = np.nonzero(grades[:, np.newaxis] > grades[np.newaxis, :])
    change = np.abs((gains[better] - gains[worse]) * (discounts[better] - discounts[worse])) / ideal
    doubt = 1.0 / (1.0 + np.exp(scores[better] - scores[worse]))
    first, second = change * doubt, change * doubt * (1.0 - doubt)
    count = len(scores)
    gradients = np.bincount(better, first, count) - np.bincount(worse, first, count)
    weights = np.bincount(better, second, count) + np.bincount(worse, second, count)
    return gradients.astype(np.float64), weights.astype(np.float64)


def _borders(features: Floats, num_bins: int) -> list[Floats]:
    shares = np.arange(1, num_bins) / num_bins
    # Rounded here, so that the written thresholds divide as the trained ones did.
    return [
        np.unique([float(f"{border:.6g}") for border in np.quantile(column, shares)])
        for column in features.T
    ]


def _tree(
    bins: Ints, gradients: Floats, weights: Floats, options: TrainingOptions
) -> tuple[tuple[Ints, Ints, Floats], Ints]:
    """Return a tree as columns, cuts (bins) and leaf values, and the leaf of each candidate."""
    num_inner = 2**options.depth - 1
    columns, cuts = np.zeros((2, num_inner), np.int64)
    cuts[:] = options.num_bins  # no candidate goes to the second child
    nodes = np.zeros(bins.shape[1], np.int64)
    for level in range(options.depth):
        first = 2**level - 1
        for node in range(first, 2 * first + 1):
            inside = np.flatnonzero(nodes == node)
            split = _best_split(bins[:, inside], gradients[inside], weights[inside], options)
            if split is not None:
                columns[node], cuts[node] = split
            nodes[inside] = 2 * node + 1 + (bins[columns[node], inside] > cuts[node])
    leaves = nodes - num_inner
    num_leaves = num_inner + 1
    totals = np.bincount(leaves, gradients, num_leaves)
    values = (
        options.learning_rate
        * totals
        / (np.bincount(leaves, weights, num_leaves) + options.leaf_penalty)
    )
    return (columns, cuts, values), leaves


def _best_split(
    bins: Ints, gradients: Floats, weights: Floats, options: TrainingOptions
) -> tuple[int, int] | None:
    """Return the column and the bin up to which candidates go to the first child."""
    best, best_gain = None, 1e-9
    total, weight = gradients.sum(), weights.sum()
    for column, values in enumerate(bins):
        left = np.cumsum(np.bincount(values, gradients, options.num_bins))[:-1]
        left_weight = np.cumsum(np.bincount(values, weights, options.num_bins))[:-1]
        gain = (
            left**2 / (left_weight + options.leaf_penalty)
            + (total - left) ** 2 / (weight - left_weight + options.leaf_penalty)
            - total**2 / (weight + options.leaf_penalty)
        )
        is_large = np.minimum(left_weight, weight - left_weight) >= options.min_leaf_weight
        left_value = left / (left_weight + options.leaf_penalty)
        right_value = (total - left) / (weight - left_weight + options.leaf_penalty)
        gain = np.where(is_large & (right_value >= left_value), gain, 0.0)
        cut = int(np.argmax(gain))
        if gain[cut] > best_gain:
            best, best_gain = (column, cut), float(gain[cut])
    return best
