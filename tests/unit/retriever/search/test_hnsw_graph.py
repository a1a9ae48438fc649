"""The walk over a graph, against faiss's own search of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import faiss
import numpy as np
import pytest

from ragcache_retriever.search.hnsw_graph import HnswGraph, Mask, Positions, WalkSlice
from ragcache_retriever.search.vector_index import Vectors

DIMENSION = 32
TOP_K = 10


class InMemory:
    """Vectors that remember which of them were read."""

    def __init__(self, values: Vectors) -> None:
        self.values = values
        self.read: list[int] = []

    def gather(self, positions: Positions) -> Vectors:
        self.read += positions.tolist()
        return np.asarray(self.values[positions])


def normalized(vectors: np.ndarray) -> Vectors:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)


def clustered(num: int, seed: int = 0) -> Vectors:
    draw = np.random.default_rng(seed)
    centres = draw.standard_normal((40, DIMENSION))
    noise = draw.standard_normal((num, DIMENSION))
    return normalized(centres[draw.integers(40, size=num)] + 0.8 * noise)


VECTORS = clustered(3000)
QUERIES = clustered(100, seed=1)
GRAPH = HnswGraph.build([VECTORS[:1000], VECTORS[1000:]], DIMENSION, links=16, effort=40)


def never() -> bool:
    return False


def walk(
    query: Vectors,
    effort: int = 64,
    live: Mask | None = None,
    cancelled: Callable[[], bool] = never,
    graph: HnswGraph = GRAPH,
    vectors: Vectors = VECTORS,
) -> list[WalkSlice]:
    return list(graph.walk(query, InMemory(vectors), effort, TOP_K, live, cancelled))


def exact(query: Vectors, live: Mask | None = None) -> Positions:
    scores = VECTORS @ query
    if live is not None:
        scores = np.where(live, scores, -2)
    return np.argsort(-scores, kind="stable")[:TOP_K]


def recall(found: Sequence[Positions]) -> float:
    shares = [
        len(set(positions) & set(exact(query))) / TOP_K
        for positions, query in zip(found, QUERIES, strict=True)
    ]
    return sum(shares) / len(shares)


def faiss_search(effort: int) -> tuple[Positions, int]:
    """Return what faiss finds with the same graph and effort, and how many vectors it compared."""
    index = faiss.IndexHNSWFlat(DIMENSION, 16, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = 40
    index.add(VECTORS[:1000])
    index.add(VECTORS[1000:])
    index.hnsw.efSearch = effort
    stats: Any = faiss.cvar
    stats.hnsw_stats.reset()
    found = index.search(QUERIES, TOP_K)[1]
    return found, int(stats.hnsw_stats.ndis)


@pytest.mark.parametrize("effort", [16, 64])
def test_a_walk_finds_as_much_as_faiss_and_compares_no_more(effort: int) -> None:
    faiss_found, faiss_compared = faiss_search(effort)
    slices = [walk(query, effort)[-1] for query in QUERIES]
    ours = recall([one.positions for one in slices])
    assert ours >= recall(list(faiss_found)) - 0.005
    assert sum(one.num_scored for one in slices) <= 1.15 * faiss_compared


def test_no_vector_is_compared_twice() -> None:
    for query in QUERIES[:20]:
        vectors = InMemory(VECTORS)
        last = list(GRAPH.walk(query, vectors, 64, TOP_K, None, never))[-1]
        assert len(vectors.read) == len(set(vectors.read)) == last.num_scored


def test_slices_get_better_and_the_last_one_is_final() -> None:
    for query in QUERIES[:20]:
        slices = walk(query)
        assert len(slices) >= 3
        best = [float(one.scores.sum()) for one in slices if len(one.scores) == TOP_K]
        assert best == sorted(best)
        progress = [one.progress for one in slices]
        assert progress == sorted(progress)
        assert [one == 1.0 for one in progress].index(True) == len(slices) - 1
        for one in slices:
            assert one.scores == pytest.approx(VECTORS[one.positions] @ query, abs=1e-5)
            assert list(one.scores) == sorted(one.scores, reverse=True)


def test_only_live_positions_are_found() -> None:
    live = np.random.default_rng(2).random(len(VECTORS)) < 0.2
    hits = []
    for query in QUERIES:
        last = walk(query, live=live)[-1]
        assert live[last.positions].all()
        hits.append(len(set(last.positions) & set(exact(query, live))))
    assert np.mean(hits) > 0.95 * TOP_K


def test_a_cancelled_walk_has_no_last_slice() -> None:
    asked = iter([False] * 12 + [True] * 1000)
    slices = walk(QUERIES[0], cancelled=lambda: next(asked))
    assert slices
    assert all(one.progress < 1 for one in slices)


@pytest.mark.parametrize("num", [0, 1, 5])
def test_a_small_graph_is_walked_completely(num: int) -> None:
    graph = HnswGraph.build([VECTORS[:num]], DIMENSION)
    last = walk(QUERIES[0], graph=graph, vectors=VECTORS[:num])[-1]
    scores = VECTORS[:num] @ QUERIES[0]
    assert last.positions.tolist() == np.argsort(-scores).tolist()
    assert last.progress == 1


def test_a_stored_graph_is_walked_alike() -> None:
    stored = HnswGraph.from_arrays(GRAPH.arrays())
    for query in QUERIES[:10]:
        first, second = walk(query)[-1], walk(query, graph=stored)[-1]
        assert first.positions.tolist() == second.positions.tolist()


def test_arrays_that_do_not_fit_are_refused() -> None:
    arrays = dict(GRAPH.arrays())
    with pytest.raises(ValueError, match="fit"):
        HnswGraph.from_arrays({**arrays, "links": arrays["links"][:-1]})
    with pytest.raises(ValueError, match="fit"):
        HnswGraph.from_arrays({**arrays, "entry": np.array([len(VECTORS), 0])})
    with pytest.raises(KeyError):
        HnswGraph.from_arrays({})
