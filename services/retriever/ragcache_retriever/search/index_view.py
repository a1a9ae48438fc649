"""One state of an index: an immutable base, rows added since, and masks of removed rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ragcache_retriever.search.cell_base import CellBase
from ragcache_retriever.search.files.stored_vectors import Positions, blocks, exact_scores
from ragcache_retriever.search.vector_index import Rows, Vectors

Mask = npt.NDArray[np.bool_]

_FIRST_TAIL = 256
_COMPARED_BLOCK = 1024


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

    Positions of the tail follow those of the base.

    Attributes:
        live: False for removed positions of the base. None: nothing was removed.
    """

    base: CellBase
    live: Mask | None
    tail: Tail

    def __len__(self) -> int:
        base = len(self.base) if self.live is None else int(self.live.sum())
        return base + int(self.tail.live.sum())

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
        base = self.base.rows if self.live is None else self.base.rows[self.live]
        return np.sort(np.concatenate([base, self.tail.rows[: self.tail.count][self.tail.live]]))

    def rows_at(self, positions: Positions) -> Rows:
        """Return the rows at positions."""
        if not self.tail.count:
            return self.base.rows[positions]
        in_tail = positions >= len(self.base)
        rows = np.empty(len(positions), np.int64)
        rows[~in_tail] = self.base.rows[positions[~in_tail]]
        rows[in_tail] = self.tail.rows[positions[in_tail] - len(self.base)]
        return rows

    def scores_at(self, positions: Positions, query: Vectors) -> Vectors:
        """Return exact scores at positions, see ``exact_scores``."""
        if not self.tail.count:
            return exact_scores(self.base.vectors.gather(positions), query)
        in_tail = positions >= len(self.base)
        scores = np.empty(len(positions), np.float32)
        scores[~in_tail] = exact_scores(self.base.vectors.gather(positions[~in_tail]), query)
        tail = positions[in_tail] - len(self.base)
        scores[in_tail] = exact_scores(self.tail.vectors[tail], query)
        return scores

    def best_at(
        self, positions: Positions, query: Vectors, top_k: int, cancelled: Callable[[], bool]
    ) -> tuple[tuple[int, ...], tuple[float, ...]] | None:
        """Compare a query with all vectors at positions.

        Args:
            cancelled: Asked between blocks of vectors.

        Returns:
            The best rows and their scores, best first; ties by row. None: it was cancelled.
        """
        scores = np.empty(len(positions), np.float32)
        for begin, end in blocks(len(positions), _COMPARED_BLOCK):
            if cancelled():
                return None
            scores[begin:end] = self.scores_at(positions[begin:end], query)
        rows = self.rows_at(positions)
        best = np.lexsort((rows, -scores))[:top_k]
        return tuple(rows[best].tolist()), tuple(scores[best].tolist())

    def allowed_positions(self, allowed: Rows) -> Positions:
        """Return the live positions of sorted rows. Rows that are not here are left out."""
        base = self.base.positions_of(allowed)
        if self.live is not None:
            base = base[self.live[base]]
        in_tail = np.isin(self.tail.rows[: self.tail.count], allowed) & self.tail.live
        return np.concatenate([base, len(self.base) + np.flatnonzero(in_tail)])

    def live_mask(self, allowed: Positions | None) -> Mask | None:
        """Return which positions of base and tail may be found. None: all."""
        if allowed is not None:
            mask: Mask = np.zeros(len(self.base) + self.tail.count, bool)
            mask[allowed] = True
            return mask
        if self.live is None and self.tail.live.all():
            return None
        live = np.ones(len(self.base), bool) if self.live is None else self.live
        both: Mask = np.concatenate([live, self.tail.live])
        return both


class LiveSource:
    """The vectors of a view, to build the next base from."""

    def __init__(self, view: IndexView) -> None:
        self._view = view
        base = np.arange(len(view.base)) if view.live is None else np.flatnonzero(view.live)
        tail = len(view.base) + np.flatnonzero(view.tail.live)
        self._positions = np.concatenate([base, tail])
        self.rows = view.rows_at(self._positions)

    def __len__(self) -> int:
        return len(self._positions)

    def gather(self, indexes: Positions) -> Vectors:
        """See VectorSource.gather."""
        positions = self._positions[indexes]
        in_tail = positions >= len(self._view.base)
        vectors = np.empty((len(positions), self._view.tail.vectors.shape[1]), np.float32)
        if (~in_tail).any():
            vectors[~in_tail] = self._view.base.vectors.gather(positions[~in_tail])
        tail = positions[in_tail] - len(self._view.base)
        vectors[in_tail] = self._view.tail.vectors[tail]
        return vectors
