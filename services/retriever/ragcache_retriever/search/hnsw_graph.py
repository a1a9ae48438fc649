"""A navigable graph over vectors (HNSW), built by faiss and walked here in slices of time.

faiss returns the hits of a search only when it has ended, and keeps its candidates to itself. This
walk visits the same graph best first, and yields the best vectors so far between its steps. It can
be cancelled there. The graph holds no vectors, so it works over mapped and quantized ones.

Source: Malkov and Yashunin, "Efficient and robust approximate nearest neighbor search using
Hierarchical Navigable Small World graphs", algorithms 2 and 5.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import faiss
import numpy as np
import numpy.typing as npt

from ragcache_retriever.search.vector_index import Vectors

Mask = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.int64]

DEFAULT_LINKS: Final = 32
DEFAULT_BUILD_EFFORT: Final = 80

_FIRST_SLICE_STEPS: Final = 8
_SLICE_GROWTH: Final = 1.25
STEPS_PER_EFFORT: Final = 1.1
"""A walk takes about this many steps per kept candidate."""


class GatheredVectors(Protocol):
    """Vectors by position."""

    def gather(self, positions: Positions) -> Vectors:
        """Return vectors, shape (len(positions), dimension)."""


@dataclass(frozen=True, slots=True)
class WalkSlice:
    """What a walk has found so far.

    Attributes:
        positions: The best ones, best first; ties by position.
        scores: Their inner products with the query.
        progress: Estimated finished share of the walk, in (0, 1]. It is 1 in the last slice only.
        num_steps: Vectors whose neighbours were compared with the query.
        num_scored: Vectors that were compared with the query. None is compared twice.
        next_score: Score of the vector whose neighbours come next, -1 in the last slice.
    """

    positions: Positions
    scores: npt.NDArray[np.float32]
    progress: float
    num_steps: int
    num_scored: int
    next_score: float


class HnswGraph:
    """Links between vectors by position, on levels. Any thread may walk it.

    Args:
        links: Linked positions of all vectors and levels, -1 for none; shape (links,), int32.
        offsets: First link of each vector, and the number of links; shape (n + 1,).
        level_offsets: First link of each level among those of one vector.
        entry: Position where walks begin. -1: there are no vectors.
        top_level: Level where walks begin.
    """

    def __init__(
        self,
        links: npt.NDArray[np.int32],
        offsets: Positions,
        level_offsets: Positions,
        entry: int,
        top_level: int,
    ) -> None:
        if len(offsets) and int(offsets[-1]) != len(links):
            raise ValueError("the links and their offsets do not fit each other")
        if not -1 <= entry < max(0, len(offsets) - 1) or top_level + 1 >= len(level_offsets):
            raise ValueError("the entry of the graph does not fit its links")
        self._links = links
        self._offsets = offsets
        self._level_offsets = level_offsets
        self._entry = entry
        self._top_level = top_level

    def __len__(self) -> int:
        return max(0, len(self._offsets) - 1)

    @classmethod
    def build(
        cls,
        batches: Iterable[Vectors],
        dimension: int,
        links: int = DEFAULT_LINKS,
        effort: int = DEFAULT_BUILD_EFFORT,
    ) -> HnswGraph:
        """Link vectors.

        It takes about a millisecond of a core per vector, and memory for all vectors.

        Args:
            batches: Vectors of length 1 by position, in batches of shape (n, dimension).
            links: Links of a vector on each level, twice as many on the lowest one.
            effort: Candidates of each link.
        """
        index = faiss.IndexHNSWFlat(dimension, links, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = effort
        for batch in batches:
            index.add(np.ascontiguousarray(batch, np.float32))
        return cls.of(index)

    @classmethod
    def of(cls, index: Any) -> HnswGraph:
        """Copy the graph of faiss's IndexHNSWFlat."""
        hnsw: Any = index.hnsw
        return cls(
            faiss.vector_to_array(hnsw.neighbors),
            faiss.vector_to_array(hnsw.offsets).astype(np.int64),
            faiss.vector_to_array(hnsw.cum_nneighbor_per_level).astype(np.int64),
            int(hnsw.entry_point),
            max(0, int(hnsw.max_level)),
        )

    def arrays(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return what to write to files, by name."""
        return {
            "links": self._links,
            "link_offsets": self._offsets,
            "level_offsets": self._level_offsets,
            "entry": np.array([self._entry, self._top_level], np.int64),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> HnswGraph:
        """Return the graph of arrays.

        Raises:
            KeyError: An array is missing.
            ValueError: The arrays do not fit each other.
        """
        entry, top_level = arrays["entry"].tolist()
        return cls(
            arrays["links"], arrays["link_offsets"], arrays["level_offsets"], entry, top_level
        )

    def walk(
        self,
        query: Vectors,
        vectors: GatheredVectors,
        effort: int,
        wanted: int,
        live: Mask | None,
        cancelled: Callable[[], bool],
    ) -> Iterator[WalkSlice]:
        """Yield the best vectors so far, the first time after a few steps.

        Args:
            query: Shape (dimension,).
            effort: Candidates that are kept (efSearch), at least ``wanted``.
            wanted: Positions of a slice.
            live: Positions that may be found, shape (n,). All are walked over. None: all.
            cancelled: Asked after each step. The walk then ends without a last slice.
        """
        if self._entry < 0:
            yield WalkSlice(np.empty(0, np.int64), np.empty(0, np.float32), 1.0, 0, 0, -1.0)
            return
        walk = _Walk(self, query, vectors, max(effort, wanted), live)
        walk.descend()
        limit = float(_FIRST_SLICE_STEPS)
        while walk.step():
            if cancelled():
                return
            if walk.num_steps >= limit:
                yield walk.slice(wanted, is_last=False)
                limit = max(walk.num_steps + 1, walk.num_steps * _SLICE_GROWTH)
        yield walk.slice(wanted, is_last=True)

    @property
    def entry(self) -> int:
        """Position where walks begin."""
        return self._entry

    @property
    def top_level(self) -> int:
        """Level where walks begin."""
        return self._top_level

    def linked(self, position: int, level: int) -> npt.NDArray[np.int32]:
        """Return the positions that one is linked to on a level."""
        first = int(self._offsets[position])
        begin, end = self._level_offsets[level : level + 2].tolist()
        found = self._links[first + begin : first + end]
        return found[found >= 0]


class _Walk:
    """The state of one walk. Each vector is compared with the query at most once."""

    def __init__(
        self,
        graph: HnswGraph,
        query: Vectors,
        vectors: GatheredVectors,
        effort: int,
        live: Mask | None,
    ) -> None:
        self._graph = graph
        self._query = query
        self._vectors = vectors
        self._effort = effort
        self._live = live
        self._visited = np.zeros(len(graph), bool)
        self._candidates: list[tuple[float, int]] = []  # heap of (-score, position)
        self._best: list[tuple[float, int]] = []  # heap of (score, -position), the worst first
        self._num_scored = 0
        self.num_steps = 0

    def descend(self) -> None:
        """Go to the nearest vector of each upper level, from the top."""
        nearest = self._graph.entry
        best = self._compare(np.array([nearest], np.int32))[0][1]
        for level in range(self._graph.top_level, 0, -1):
            while True:
                # Vectors that were compared before are no nearer than the nearest one.
                found = self._compare(self._graph.linked(nearest, level))
                position, score = max(found, key=lambda one: one[1], default=(nearest, best))
                if score <= best:
                    break
                nearest, best = position, score

    def step(self) -> bool:
        """Compare the neighbours of the best candidate. Return False if no step can help."""
        if not self._candidates:
            return False
        score, position = heapq.heappop(self._candidates)
        if -score < self._worst():
            heapq.heappush(self._candidates, (score, position))
            return False
        self.num_steps += 1
        self._compare(self._graph.linked(position, 0))
        return True

    def slice(self, wanted: int, *, is_last: bool) -> WalkSlice:
        """Return the best vectors so far."""
        best = heapq.nlargest(wanted, self._best)
        expected = self._effort * STEPS_PER_EFFORT
        next_score = -self._candidates[0][0] if self._candidates and not is_last else -1.0
        return WalkSlice(
            np.array([-position for _, position in best], np.int64),
            np.array([score for score, _ in best], np.float32),
            1.0 if is_last else min(self.num_steps / expected, 0.99),
            self.num_steps,
            self._num_scored,
            next_score,
        )

    def _compare(self, positions: npt.NDArray[np.int32]) -> list[tuple[int, float]]:
        """Compare new positions with the query, and keep them as candidates if they may help."""
        new = positions[~self._visited[positions]]
        if not len(new):
            return []
        self._visited[new] = True
        scores = self._vectors.gather(new.astype(np.int64)) @ self._query
        self._num_scored += len(new)
        found = list(zip(new.tolist(), scores.tolist(), strict=True))
        worst = self._worst()
        for position, score in found:
            if score < worst:
                continue
            heapq.heappush(self._candidates, (-score, position))
            if self._live is None or self._live[position]:
                heapq.heappush(self._best, (score, -position))
                if len(self._best) > self._effort:
                    heapq.heappop(self._best)
                worst = self._worst()
        return found

    def _worst(self) -> float:
        """Return the score that a vector must reach to be kept."""
        return self._best[0][0] if len(self._best) >= self._effort else -np.inf
