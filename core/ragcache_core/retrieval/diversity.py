"""Orders hits so that each adds something to the ones before it.

Source: Carbonell and Goldstein, The use of MMR, diversity-based reranking (SIGIR 1998).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float64]
Vectors = npt.NDArray[np.float32]


def diverse_order(scores: Scores, vectors: Vectors, diversity: float, limit: int) -> list[int]:
    """Return the indexes of hits by maximal marginal relevance, best first.

    Each step takes the hit with the highest ``(1 - diversity) * score - diversity * similarity``.
    The score is scaled to [0, 1] over the hits. The similarity is the highest cosine to a hit that
    is taken already. Ties go to the earlier hit.

    Args:
        scores: Shape (n,), higher is better, in descending order.
        vectors: Shape (n, dimension), of length 1.
        diversity: In [0, 1]. With 0 the order stays.
        limit: Most indexes to return.
    """
    num_taken = min(limit, len(scores))
    if diversity == 0.0 or num_taken <= 1:
        return list(range(num_taken))
    span = float(scores.max() - scores.min())
    relevance = (scores - scores.min()) / span if span else np.ones(len(scores))
    similarity = np.full(len(scores), -1.0)
    is_left = np.ones(len(scores), bool)
    order: list[int] = []
    taken = 0
    while True:
        order.append(taken)
        is_left[taken] = False
        if len(order) == num_taken:
            return order
        similarity = np.maximum(similarity, vectors @ vectors[taken])
        gain = (1.0 - diversity) * relevance - diversity * similarity
        taken = int(np.argmax(np.where(is_left, gain, -np.inf)))
