"""One state of an index: an immutable base, rows added since, and masks of removed rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ragcache_retriever.search.faiss_base import (
    FaissBase,
    Mask,
    Positions,
    SearchEffort,
    SearchPart,
    pairs,
)
from ragcache_retriever.search.faiss_build import VectorSource
from ragcache_retriever.search.vector_index import Rows, Vectors

_FIRST_TAIL = 256
_TAIL_BLOCK = 1 << 13


@dataclass(frozen=True, slots=True)
class Tail:
    """Rows that were added after the base was built.

    The arrays may be longer than ``count`` and are shared with later tails, which write only after
    ``count``. A later tail never changes what this one shows.

    Attributes:
        live: False for rows that were removed again, shape (count,).
    """

    rows: Rows
    vectors: Vectors
    count: int
    live: Mask

    @classmethod
    def empty(cls, dimension: int) -> Tail:
        """Return a tail without rows."""
        vectors = np.empty((0, dimension), np.float32)
        return cls(np.empty(0, np.int64), vectors, 0, np.empty(0, bool))

    def added(self, rows: Rows, vectors: Vectors) -> Tail:
        """Return a tail with more rows. Call it for the latest tail only."""
        count = self.count + len(rows)
        all_rows, all_vectors = self.rows, self.vectors
        if count > len(all_rows):
            size = max(count, 2 * len(all_rows), _FIRST_TAIL)
            all_rows = np.empty(size, np.int64)
            all_vectors = np.empty((size, self.vectors.shape[1]), np.float32)
            all_rows[: self.count] = self.rows[: self.count]
            all_vectors[: self.count] = self.vectors[: self.count]
        all_rows[self.count : count] = rows
        all_vectors[self.count : count] = vectors
        live = np.concatenate([self.live, np.ones(len(rows), bool)])
        return Tail(all_rows, all_vectors, count, live)

    def without(self, rows: Rows) -> Tail:
        """Return a tail in which rows are removed."""
        gone = np.isin(self.rows[: self.count], rows)
        return replace(self, live=self.live & ~gone) if gone.any() else self

    def since(self, count: int) -> Tail:
        """Return the rows that are live and were added after the first ``count``."""
        later = slice(count, self.count)
        live = self.live[later]
        rows, vectors = self.rows[later][live], self.vectors[later][live]
        return Tail(rows, vectors, len(rows), np.ones(len(rows), bool))


@dataclass(frozen=True, slots=True)
class IndexView:
    """One state of an index, for any number of searches.

    Attributes:
        live: False for removed positions of the base. None: nothing was removed.
    """

    base: FaissBase
    live: Mask | None
    tail: Tail

    def __len__(self) -> int:
        return len(self.base) - self.num_removed + int(self.tail.live.sum())

    @property
    def num_removed(self) -> int:
        """Removed positions of the base."""
        return 0 if self.live is None else len(self.live) - int(self.live.sum())

    def changed(self, removed: Rows, added: Rows, vectors: Vectors) -> IndexView:
        """Return the state after a change. Call it for the latest view only."""
        live, tail = self.live, self.tail
        if len(removed):
            tail = tail.without(removed)
            positions = self.base.positions_of(removed)
            if len(positions):
                live = np.ones(len(self.base), bool) if live is None else live.copy()
                live[positions] = False
        if len(added):
            tail = tail.added(added, vectors)
        return IndexView(self.base, live, tail)

    def rows(self) -> Rows:
        """Return all rows, sorted."""
        return self.source().rows

    def source(self) -> VectorSource:
        """Return the vectors of this view, to build the next base from."""
        base = np.arange(len(self.base)) if self.live is None else np.flatnonzero(self.live)
        tail = np.flatnonzero(self.tail.live)
        rows = np.concatenate([self.base.rows[base], self.tail.rows[tail]])
        order = np.argsort(rows, kind="stable")
        positions = np.concatenate([base, len(self.base) + tail])[order]

        def gather(indexes: Positions) -> Vectors:
            chosen = positions[indexes]
            in_base = chosen < len(self.base)
            vectors = np.empty((len(chosen), self.tail.vectors.shape[1]), np.float32)
            if in_base.any():
                vectors[in_base] = self.base.gather(chosen[in_base])
            vectors[~in_base] = self.tail.vectors[chosen[~in_base] - len(self.base)]
            return vectors

        return VectorSource(rows[order], gather)

    def search(
        self, query: Vectors, top_k: int, effort: SearchEffort, allowed: Rows | None
    ) -> Iterator[SearchPart]:
        """Search the tail and then the base in parts, the last one with progress 1.

        Args:
            allowed: Sorted rows that may be found. None: all.
        """
        tail = np.flatnonzero(self.tail.live)
        mask, positions = self.live, None
        if allowed is not None:
            tail = tail[np.isin(self.tail.rows[tail], allowed)]
            positions = self.base.positions_of(allowed)
            if self.live is not None:
                positions = positions[self.live[positions]]
            mask = np.zeros(len(self.base), bool)
            mask[positions] = True
        for begin in range(0, len(tail), _TAIL_BLOCK):
            block = tail[begin : begin + _TAIL_BLOCK]
            scores = self.tail.vectors[block] @ query
            best = np.argsort(-scores, kind="stable")[:top_k]
            found = pairs(self.tail.rows[block[best]], scores[best])
            yield SearchPart(found, 0.0, len(block), ends_stage=False)
        if not len(self.base) or not (mask is None or mask.any()):
            yield SearchPart([], 1.0, 0, ends_stage=True)
            return
        yield from self.base.search(query, top_k, effort, mask, positions)
