"""The best candidates of a search by their fused scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ragcache_core.retrieval.fusion import (
    Candidates,
    Rows,
    Scores,
    best_order,
    fused_scores,
    merged_legs,
)
from ragcache_retriever.ranking.candidate_pool import CandidatePool
from ragcache_retriever.search.vector_index import Vectors
from ragcache_retriever.store.records import LexicalHit


@dataclass(frozen=True, slots=True, eq=False)
class FusedCandidates:
    """Candidates, best fused score first, and their fused scores."""

    candidates: Candidates
    scores: Scores

    def ordered(self, order: Rows, scores: Scores) -> FusedCandidates:
        """Return the candidates at the indexes of ``order``, with other scores."""
        return FusedCandidates(_taken(self.candidates, order), scores[order])


def fuse_legs(
    dense_hits: tuple[Sequence[int], Sequence[float]],
    lexical_hits: Sequence[LexicalHit],
    lexical_weight: float,
    limit: int | None = None,
    *,
    query: Vectors | None = None,
    pool: CandidatePool | None = None,
) -> FusedCandidates:
    """Return the best candidates of two legs.

    Args:
        dense_hits: Rows and cosine similarities, best first.
        lexical_weight: Weight of the lexical leg, in [0, 1].
        limit: Most candidates to return. None: all.
        query: Embedding of the question. With it, hits of the lexical leg alone get a similarity.
        pool: Where their embeddings are read.
    """
    merged = merged_legs(
        np.array(dense_hits[0], np.int64),
        np.array(dense_hits[1], np.float64),
        np.array([hit.row for hit in lexical_hits], np.int64),
        np.array([hit.score for hit in lexical_hits], np.float64),
    )
    is_unknown = np.isnan(merged.dense)
    if query is not None and pool is not None and lexical_weight < 1.0 and is_unknown.any():
        vectors = pool.vectors(merged.rows[is_unknown].tolist())
        has_vector = vectors.any(axis=1)
        merged.dense[is_unknown] = np.where(has_vector, vectors @ query, np.nan)
    scores = fused_scores(merged, lexical_weight)
    order = best_order(scores, merged)[:limit]
    return FusedCandidates(_taken(merged, order), scores[order])


def _taken(candidates: Candidates, order: Rows) -> Candidates:
    return Candidates(
        candidates.rows[order],
        candidates.dense[order],
        candidates.lexical[order],
        candidates.dense_ranks[order],
        candidates.lexical_ranks[order],
    )
