"""Combines the dense and the lexical leg of a search into one score.

Each leg's scores are divided by its best one, so that they become comparable. The fused score is
their weighted mean. A weight of 0 or 1 ranks as one leg alone does.

Source: Bruch, Gai and Ingber, An analysis of fusion functions for hybrid retrieval (2023): a convex
combination beats reciprocal rank fusion.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]

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
    """

    rows: Rows
    dense: Scores
    lexical: Scores
    dense_ranks: Rows
    lexical_ranks: Rows

    def taken(self, order: Rows) -> Candidates:
        """Return the candidates at these indexes, in their order."""
        return Candidates(
            self.rows[order],
            self.dense[order],
            self.lexical[order],
            self.dense_ranks[order],
            self.lexical_ranks[order],
        )


def merged_legs(
    dense_rows: Rows, dense_scores: Scores, lexical_rows: Rows, lexical_scores: Scores
) -> Candidates:
    """Return the candidates of two legs. Each leg is sorted, best first."""
    rows = np.union1d(dense_rows, lexical_rows).astype(np.int64)
    in_dense = np.searchsorted(rows, dense_rows)
    in_lexical = np.searchsorted(rows, lexical_rows)
    dense, lexical = np.full((2, len(rows)), np.nan)
    dense[in_dense] = dense_scores
    lexical[in_lexical] = lexical_scores
    dense_ranks, lexical_ranks = np.zeros((2, len(rows)), np.int64)
    dense_ranks[in_dense] = np.arange(1, len(dense_rows) + 1)
    lexical_ranks[in_lexical] = np.arange(1, len(lexical_rows) + 1)
    return Candidates(rows, dense, lexical, dense_ranks, lexical_ranks)


def fused_scores(candidates: Candidates, lexical_weight: float) -> Scores:
    """Return the fused score of each candidate, shape (n,).

    A leg that has not found a candidate gives it 0, and so does a leg without hits.

    Args:
        lexical_weight: Weight of the lexical leg, in [0, 1]. The dense leg has the rest.
    """
    dense = share_of_best(candidates.dense)
    lexical = share_of_best(candidates.lexical)
    fused: Scores = (1.0 - lexical_weight) * dense + lexical_weight * lexical
    return fused


def share_of_best(scores: Scores) -> Scores:
    """Return scores as shares of the best one, in [0, 1]. Unknown and negative ones become 0."""
    known = np.maximum(np.nan_to_num(scores, nan=0.0), 0.0)
    best = known.max(initial=0.0)
    return known / best if best > 0.0 else np.zeros(len(scores))


def best_order(scores: Scores, candidates: Candidates) -> Rows:
    """Return the indexes of the candidates, best score first.

    Ties go to the higher cosine similarity, then to the lower row.
    """
    dense = np.nan_to_num(candidates.dense, nan=-np.inf)
    order: Rows = np.lexsort((candidates.rows, -dense, -scores))
    return order
