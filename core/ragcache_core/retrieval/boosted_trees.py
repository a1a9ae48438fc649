"""Scores of gradient-boosted regression trees, which rank the candidates of a search.

All trees are complete binary trees of one depth, so all candidates descend all trees together.

Source: Burges, From RankNet to LambdaRank to LambdaMART: an overview (2010).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ragcache_core.errors import InvalidInput

FORMAT = 1
"""Increase it when the meaning of the text changes."""

Features = npt.NDArray[np.float64]
Scores = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class BoostedTrees:
    """Trees whose values are summed up.

    Attributes:
        feature_names: Of the columns of the features.
        split_features: Shape (trees, 2 ** depth - 1): the column that each inner node compares. The
            children of node i are 2 i + 1 and 2 i + 2.
        thresholds: Shape as ``split_features``. A greater feature goes to the second child.
        leaf_values: Shape (trees, 2 ** depth).
        provenance: What the trees were trained on, and how.
    """

    feature_names: tuple[str, ...]
    split_features: npt.NDArray[np.int64]
    thresholds: npt.NDArray[np.float64]
    leaf_values: npt.NDArray[np.float64]
    provenance: Mapping[str, Any]

    def __post_init__(self) -> None:
        num_trees, num_leaves = self.leaf_values.shape
        expected = (num_trees, num_leaves - 1)
        if self.split_features.shape != expected or self.thresholds.shape != expected:
            raise InvalidInput("trees", "have inner nodes that do not fit the leaves", _RETRAIN)
        if num_leaves & (num_leaves - 1):
            raise InvalidInput("trees", f"have {num_leaves} leaves", _RETRAIN)
        columns = self.split_features
        if columns.size and not 0 <= columns.min() <= columns.max() < len(self.feature_names):
            raise InvalidInput("trees", "compare features that have no name", _RETRAIN)

    @property
    def depth(self) -> int:
        """Comparisons from the root to a leaf."""
        num_leaves: int = self.leaf_values.shape[1]
        return num_leaves.bit_length() - 1

    def scores(self, features: Features) -> Scores:
        """Return the score of each candidate.

        Args:
            features: Shape (n, len(feature_names)), finite.

        Returns:
            Shape (n,).
        """
        num_trees, num_leaves = self.leaf_values.shape
        trees = np.arange(num_trees)
        candidates = np.arange(len(features))[:, np.newaxis]
        nodes = np.zeros((len(features), num_trees), np.int64)
        for _ in range(self.depth):
            is_greater = (
                features[candidates, self.split_features[trees, nodes]]
                > self.thresholds[trees, nodes]
            )
            nodes = 2 * nodes + 1 + is_greater
        total: Scores = self.leaf_values[trees, nodes - (num_leaves - 1)].sum(axis=1)
        return total


def trees_to_text(trees: BoostedTrees) -> str:
    """Return trees as JSON, one tree on a line."""
    lines = [
        json.dumps([features, thresholds, values], separators=(",", ":"))
        for features, thresholds, values in zip(
            trees.split_features.tolist(),
            trees.thresholds.tolist(),
            trees.leaf_values.tolist(),
            strict=True,
        )
    ]
    head = json.dumps(
        {
            "format": FORMAT,
            "provenance": dict(trees.provenance),
            "features": list(trees.feature_names),
        },
        indent=1,
    )
    return head[:-2] + ',\n "trees": [\n' + ",\n".join(lines) + "\n]}\n"


def trees_from_text(text: str) -> BoostedTrees:
    """Return the trees that ``trees_to_text`` has written.

    Raises:
        InvalidInput: The text holds no trees of this format.
    """
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise InvalidInput("trees", f"are of format {content['format']}", _RETRAIN)
        features, thresholds, values = zip(*content["trees"], strict=True)
        return BoostedTrees(
            tuple(content["features"]),
            np.array(features, np.int64),
            np.array(thresholds, np.float64),
            np.array(values, np.float64),
            content["provenance"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput("trees", f"cannot be read: {error}", _RETRAIN) from error


_RETRAIN = "train them again with tools/train_ranker.py"
