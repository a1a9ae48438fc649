"""Compares a query with each of some rows, without a scan or a walk over a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from ragcache_retriever.search.files.stored_vectors import Positions, blocks
from ragcache_retriever.search.index_view import IndexView
from ragcache_retriever.search.vector_index import Vectors

_BLOCK: Final = 1024


def best_of(
    view: IndexView,
    query: Vectors,
    top_k: int,
    positions: Positions,
    cancelled: Callable[[], bool],
) -> tuple[tuple[int, ...], tuple[float, ...]] | None:
    """Return the best rows at positions and their scores, best first; ties by row.

    Returns:
        None: The search was cancelled.
    """
    scores = np.empty(len(positions), np.float32)
    for begin, end in blocks(len(positions), _BLOCK):
        if cancelled():
            return None
        scores[begin:end] = view.scores_at(positions[begin:end], query)
    rows = view.rows_at(positions)
    best = np.lexsort((rows, -scores))[:top_k]
    return tuple(rows[best].tolist()), tuple(scores[best].tolist())
