"""Combines the dense and the lexical leg of a search into one score.

Each leg's scores are divided by its best one, so that they become comparable. The fused score is
their weighted mean. A weight of 0 or 1 ranks as one leg alone does. Chunks with an identifier of
the question come before those without, so their scores are raised above the others'.

Source: Bruch, Gai and Ingber, An analysis of fusion functions for hybrid retrieval (2023): a convex
combination beats reciprocal rank fusion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]

Position: TypeAlias = tuple[str, int]
"""Document id and ordinal of a chunk."""

SCORE_STEP = 1e-6
DEFAULT_LEXICAL_WEIGHT = 0.4
"""Weight of the lexical leg in collections that set none. With it both legs together find more than
either leg alone, in all collections of ``bench.retrieval_quality``."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Chunks that a leg has found, in any order.

    Attributes:
        rows: Shape (n,), without repeats.
        dense: Cosine similarity to the question, shape (n,). NaN: not known.
        lexical: BM25, shape (n,). NaN: the lexical leg has not found the chunk.
        dense_ranks: From 1, shape (n,). 0: the dense leg has not found the chunk.
        lexical_ranks: Likewise.
        num_identifiers: How many of the question's identifiers the lexical leg has found in each
            chunk, shape (n,).
    """

    rows: Rows
    dense: Scores
    lexical: Scores
    dense_ranks: Rows
    lexical_ranks: Rows
    num_identifiers: Rows

    def taken(self, order: Rows) -> Candidates:
        """Return the candidates at these indexes, in their order."""
        return Candidates(
            self.rows[order],
            self.dense[order],
            self.lexical[order],
            self.dense_ranks[order],
            self.lexical_ranks[order],
            self.num_identifiers[order],
        )


def merged_legs(
    dense_rows: Rows,
    dense_scores: Scores,
    lexical_rows: Rows,
    lexical_scores: Scores,
    num_identifiers: Rows,
) -> Candidates:
    """Return the candidates of two legs. Each leg is sorted, best first.

    Args:
        num_identifiers: Of the chunks of the lexical leg.
    """
    rows = np.union1d(dense_rows, lexical_rows).astype(np.int64)
    in_dense = np.searchsorted(rows, dense_rows)
    in_lexical = np.searchsorted(rows, lexical_rows)
    dense, lexical = np.full((2, len(rows)), np.nan)
    dense[in_dense] = dense_scores
    lexical[in_lexical] = lexical_scores
    dense_ranks, lexical_ranks, identifiers = np.zeros((3, len(rows)), np.int64)
    dense_ranks[in_dense] = np.arange(1, len(dense_rows) + 1)
    lexical_ranks[in_lexical] = np.arange(1, len(lexical_rows) + 1)
    identifiers[in_lexical] = num_identifiers
    return Candidates(rows, dense, lexical, dense_ranks, lexical_ranks, identifiers)


def fused_scores(candidates: Candidates, lexical_weight: float) -> Scores:
    """Return the fused score of each candidate, shape (n,), before it is raised for identifiers.

    A leg that has not found a candidate gives it 0, and so does a leg without hits.

    Args:
        lexical_weight: Weight of the lexical leg, in [0, 1]. The dense leg has the rest.
    """
    dense = share_of_best(candidates.dense)
    lexical = share_of_best(candidates.lexical)
    fused: Scores = (1.0 - lexical_weight) * dense + lexical_weight * lexical
    return fused


def raised_scores(scores: Scores, num_identifiers: Rows, most: float = math.inf) -> Scores:
    """Return scores that are higher for chunks with more identifiers of the question.

    Chunks without an identifier keep their scores. The others' are added to the best score of the
    chunks with fewer identifiers.

    Args:
        scores: Shape (n,), in [0, most].
        num_identifiers: Shape (n,).
        most: The scores that are returned are in [0, most], too.
    """
    raised = scores.copy()
    for count in np.unique(num_identifiers[num_identifiers > 0]):
        are_fewer, has_so_many = num_identifiers < count, num_identifiers == count
        best = np.nan_to_num(raised[are_fewer], nan=0.0).max(initial=0.0)
        raised[has_so_many] = best + (1.0 - best / most) * scores[has_so_many]
    return raised


def share_of_best(scores: Scores) -> Scores:
    """Return scores as shares of the best one, in [0, 1]. Unknown and negative ones become 0."""
    known = np.maximum(np.nan_to_num(scores, nan=0.0), 0.0)
    best = known.max(initial=0.0)
    return known / best if best > 0.0 else np.zeros(len(scores))


def best_order(
    scores: Scores, candidates: Candidates, positions: Callable[[Sequence[int]], Sequence[Position]]
) -> Rows:
    """Return the indexes of the candidates, best score first.

    Ties go to the lower document id, then to the lower ordinal. Scores that differ by less than
    ``SCORE_STEP`` are ties: embeddings of one text in two batches differ as much.

    Args:
        scores: Not raised. Raised ones are equal where a chunk without the identifier has most.
        positions: Returns document id and ordinal of rows. It is asked about ties only.
    """
    steps = np.round(scores / SCORE_STEP)
    keys = np.stack([candidates.num_identifiers, steps])
    _, inverse, counts = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
    tied = np.flatnonzero(counts[inverse.reshape(-1)] > 1)
    ranks = np.zeros(len(scores), np.int64)
    found = positions(candidates.rows[tied].tolist())
    ranks[tied[sorted(range(len(tied)), key=lambda i: found[i])]] = np.arange(len(tied))
    order: Rows = np.lexsort((ranks, -steps, -candidates.num_identifiers))
    return order
