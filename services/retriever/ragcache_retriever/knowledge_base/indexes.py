"""The open vector indexes, by generation.

A document is committed before its index changes, and the index may be in another service. If the
index refuses a change, its rows are remembered as missed, and the write succeeds. From then on the
index gets no change by itself: ``catch_up`` gives it the missed rows as the document store has them
by then, and ends that state. After a restart ``open`` compares all rows.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.search.vector_index import RowIndex, VectorIndexes
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import IndexChange, Rows, Vectors

log = logging.getLogger(__name__)

RECONCILED_ROWS = 4096
"""Rows whose vectors are read at a time to complete an index."""


class _OpenIndex:
    """An index, and how many searches use it. The last user of a dropped one closes it.

    ``missed`` has the rows of refused changes, in the order of the changes. Rows may recur.
    """

    def __init__(self, index: RowIndex, kind: IndexKind) -> None:
        self.index = index
        self.kind = kind
        self.num_users = 0
        self.is_dropped = False
        self.is_behind = False
        self.missed: list[Rows] = []
        self.changing = threading.Lock()


class GenerationIndexes:
    """Opens an index for each generation, changes it after each commit, and drops it at last.

    An index that lacks a committed change serves on until ``catch_up`` has completed it.

    Searches may use an index on any thread, and one thread calls ``catch_up``. One other thread at
    a time calls the methods that change indexes.
    """

    def __init__(self, store: DocumentStore, indexes: VectorIndexes) -> None:
        self._store = store
        self._indexes = indexes
        self._open: dict[int, _OpenIndex] = {}
        self._changed = threading.Condition()
        self._num_published = 0
        self._num_changes: Counter[int] = Counter()

    def open(self, generation: int, dimension: int, kind: IndexKind) -> None:
        """Open the index of a generation and complete it, or change the kind of an open one.

        Raises:
            Unavailable: The index does not answer.
        """
        opened = self._open.get(generation)
        if opened is None:
            index = self._indexes.open(generation, dimension, kind)
            try:
                self._reconcile(generation, index)
            except BaseException:
                index.close()
                raise
            with self._changed:
                self._open[generation] = _OpenIndex(index, kind)
        elif opened.kind is not kind:
            with opened.changing:
                opened.index.set_kind(kind)
            opened.kind = kind

    def keep_only(self, generations: Iterable[int]) -> None:
        """Drop the indexes of all other generations, open ones and stored ones."""
        kept = set(generations)
        for generation in self._open.keys() - kept:
            with self._changed:
                opened = self._open.pop(generation)
                opened.is_dropped = True
                is_unused = opened.num_users == 0
            if is_unused:
                self._remove(generation, opened)
        for generation in set(self._indexes.stored_generations()) - kept - self._open.keys():
            self._indexes.remove(generation)

    def apply(self, changes: Iterable[IndexChange]) -> None:
        """Make committed changes visible to searches, now or, if the index refuses, later."""
        for change in changes:
            self._num_changes[change.generation] += 1
            opened = self._open.get(change.generation)
            if opened is not None and (change.removed or change.added):
                self._apply(opened, change)
        self._publish()

    def num_missed(self, generation: int) -> int:
        """Return how many rows the index of a generation has yet to catch up with."""
        with self._changed:
            opened = self._open.get(generation)
            return 0 if opened is None else sum(map(len, opened.missed))

    def is_behind(self, generation: int) -> bool:
        """Whether the index of a generation lacks rows, or has rows that no longer exist."""
        opened = self._open.get(generation)
        return opened is not None and opened.is_behind

    def behind(self) -> list[int]:
        """Return the generations whose indexes are behind."""
        with self._changed:
            opened = tuple(self._open.items())
        return [generation for generation, one in opened if one.is_behind]

    def catch_up(self, generation: int) -> None:
        """Give an index what it has missed. Changes that come meanwhile are missed, too.

        Raises:
            Unavailable: The index or the document store does not answer.
            OSError: A disk refuses.
        """
        num_rows = 0
        with self._borrowed(generation) as opened:
            while (rows := self._next_missed(opened)) is not None:
                with opened.changing:
                    self._bring_up_to_date(generation, opened.index, rows)
                num_rows += len(rows)
                with self._changed:
                    opened.missed[0] = opened.missed[0][len(rows) :]
        log.info("index: caught up generation=%d rows=%d", generation, num_rows)
        self._publish()

    @property
    def num_published(self) -> int:
        """Number of committed changes that searches see."""
        return self._num_published

    def num_changes(self, generation: int) -> int:
        """Return the number of committed changes of a generation."""
        return self._num_changes[generation]

    def wait_for_change(self, after: int, timeout_s: float) -> None:
        """Wait until more than a number of changes are published, for a time at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_published > after, timeout_s)

    @contextlib.contextmanager
    def using(self, generation: int) -> Iterator[RowIndex]:
        """Yield the index of a generation, which stays open meanwhile.

        Raises:
            Unavailable: It is not open, because the collection was switched or is being opened.
        """
        with self._borrowed(generation) as opened:
            yield opened.index

    def close(self) -> None:
        """Close all indexes. No search may run any more."""
        for opened in self._open.values():
            opened.index.close()
        self._open.clear()

    @contextlib.contextmanager
    def _borrowed(self, generation: int) -> Iterator[_OpenIndex]:
        with self._changed:
            opened = self._open.get(generation)
            if opened is None:
                raise Unavailable("retriever", "the collection's index is being opened")
            opened.num_users += 1
        try:
            yield opened
        finally:
            with self._changed:
                opened.num_users -= 1
                is_last = opened.is_dropped and opened.num_users == 0
            if is_last:
                self._remove(generation, opened)

    def _apply(self, opened: _OpenIndex, change: IndexChange) -> None:
        if self._is_missed(opened, change):
            return
        try:
            with opened.changing:
                opened.index.apply(change.removed, change.added, change.vectors)
        except Exception as error:
            # Any failure, because the document is committed.
            log.warning(
                "index: behind generation=%d error=%s",
                change.generation,
                error,
                exc_info=not isinstance(error, RagCacheError),
            )
            with self._changed:
                opened.is_behind = True
            self._is_missed(opened, change)

    def _publish(self) -> None:
        with self._changed:
            self._num_published += 1
            self._changed.notify_all()

    def _is_missed(self, opened: _OpenIndex, change: IndexChange) -> bool:
        """Note a change for later if the index is behind, and return whether it is."""
        with self._changed:
            if opened.is_behind:
                opened.missed.append(np.array([*change.removed, *change.added], np.int64))
            return opened.is_behind

    def _next_missed(self, opened: _OpenIndex) -> Rows | None:
        """Return the next rows to catch up with. None: the index is no longer behind."""
        with self._changed:
            while opened.missed and not len(opened.missed[0]):
                del opened.missed[0]
            if not opened.missed:
                opened.is_behind = False
                return None
            # Joined, because most changes are those of small documents.
            opened.missed = [np.concatenate(opened.missed)]
            return opened.missed[0][:RECONCILED_ROWS]

    def _bring_up_to_date(self, generation: int, index: RowIndex, rows: Rows) -> None:
        """Let an index have rows as the document store has them."""
        wanted: list[int] = np.unique(rows).tolist()
        present, vectors = self._store.embeddings.of_rows(generation, wanted)
        # All are removed first, because a change that failed may have added some.
        index.apply(wanted, present.tolist(), vectors)

    def _remove(self, generation: int, opened: _OpenIndex) -> None:
        opened.index.close()
        self._indexes.remove(generation)

    def _batches(self, generation: int) -> Iterator[tuple[Rows, Vectors]]:
        after = 0
        while True:
            rows, vectors = self._store.embeddings.after(generation, after, RECONCILED_ROWS)
            if not len(rows):
                return
            yield rows, vectors
            after = int(rows[-1])

    def _reconcile(self, generation: int, index: RowIndex) -> None:
        """Let an index hold the rows of the document store: what it missed, and nothing else."""
        stored, indexed = self._store.embeddings.rows(generation), index.rows()
        if len(stored) and not len(indexed):
            index.load(self._batches(generation))
            log.info("index: built generation=%d vectors=%d", generation, len(stored))
            return
        surplus = np.setdiff1d(indexed, stored, assume_unique=True)
        missing = np.setdiff1d(stored, indexed, assume_unique=True)
        if len(surplus):
            index.apply(surplus.tolist(), (), np.empty((0, 0), np.float32))
        for first in range(0, len(missing), RECONCILED_ROWS):
            wanted = missing[first : first + RECONCILED_ROWS]
            rows, vectors = self._store.embeddings.of_rows(generation, wanted.tolist())
            index.apply((), rows.tolist(), vectors)
        if len(surplus) or len(missing):
            log.info(
                "index: reconciled generation=%d removed=%d added=%d",
                generation,
                len(surplus),
                len(missing),
            )
