"""Real staged searches of generated vectors, recorded with what each stage found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.support.staged.clustered_vectors import draw_queries, draw_vectors, make_clusters
from bench.support.staged.indexes import build, searched
from bench.support.staged.stages import search
from ragcache_retriever.search.faiss_base import SearchEffort
from ragcache_retriever.search.vector_index import IndexStage

NUM_VECTORS = 20_000
LEARNED = 128
"""Searches before the recorded ones, from which the retriever learns when hits are final."""


def record_searches(
    shares: Sequence[float], count: int, seed: int = 0
) -> dict[float, list[Sequence[IndexStage]]]:
    """Return the stages of searches that scan a share of all vectors, by share.

    Args:
        shares: Vector search ratios, in (0, 1].
        count: Searches of each share.
    """
    draw = np.random.default_rng(seed)
    clusters = make_clusters(NUM_VECTORS, draw)
    vectors = draw_vectors(clusters, NUM_VECTORS, draw)
    queries = draw_queries(clusters, vectors, LEARNED + count, draw)
    base = build(vectors)
    recorded: dict[float, list[Sequence[IndexStage]]] = {}
    for share in shares:
        with searched(base, SearchEffort(0, share)) as index:
            found = [search(index, query).stages for query in queries]
        recorded[share] = found[LEARNED:]
    return recorded


def final_progress(stages: Sequence[IndexStage]) -> float:
    """Return the share of a search after which its hits stay as they are."""
    last = stages[-1].rows
    first = next(i for i in range(len(stages)) if all(one.rows == last for one in stages[i:]))
    return stages[first].progress
