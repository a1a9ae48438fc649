"""The open vector indexes, by generation."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from ragcache_core.errors import Unavailable
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import IndexChange, Rows, Vectors
from ragcache_retriever.store.vector_indexes import RowIndex, VectorIndexes

log = logging.getLogger(__name__)

RECONCILED_ROWS = 4096
"""Rows whose vectors are read at a time to complete an index."""


class _OpenIndex:
    """An index, and how many searches use it. The last user of a dropped one closes it."""

    def __init__(self, index: RowIndex) -> None:
        self.index = index
        self.num_users = 0
        self.is_dropped = False


class GenerationIndexes:
    """Opens an index for each generation, changes it after each commit, and drops it at last.

    An index that an error kept from a committed change, or whose files are damaged, serves on until
    ``recover`` has completed it.

    Searches may use an index on any thread. One thread at a time calls the other methods.
    """

    def __init__(self, store: DocumentStore, indexes: VectorIndexes) -> None:
        self._store = store
        self._indexes = indexes
        self._open: dict[int, _OpenIndex] = {}
        self._incomplete: set[int] = set()
        self._changed = threading.Condition()
        self._num_published = 0
        self._num_changes: Counter[int] = Counter()

    def open(self, generation: int, dimension: int, kind: IndexKind) -> None:
        """Open the index of a generation and complete it from the document store."""
        if generation in self._open:
            return
        index = self._indexes.open(generation, dimension, kind)
        try:
            self._reconcile(generation, index)
        except BaseException:
            index.close()
            raise
        with self._changed:
            self._open[generation] = _OpenIndex(index)

    def keep_only(self, generations: Iterable[int]) -> None:
        """Drop the indexes of all other generations, open ones and stored ones."""
        kept = set(generations)
        for generation in self._open.keys() - kept:
            self._drop(generation)
        for generation in set(self._indexes.stored_generations()) - kept - self._open.keys():
            self._indexes.remove(generation)

    def set_kind(self, generation: int, kind: IndexKind) -> None:
        """Change the kind of a generation's index."""
        if generation in self._open:
            self._open[generation].index.set_kind(kind)

    def apply(self, changes: Iterable[IndexChange]) -> None:
        """Make committed changes visible to searches. After an error they are so after ``recover``.

        Raises:
            Unavailable: The index is at a server that does not answer.
            OSError: A disk refuses.
        """
        changes = tuple(changes)
        self._num_changes.update(change.generation for change in changes)
        try:
            for change in changes:
                opened = self._open.get(change.generation)
                if opened is not None and (change.removed or change.added):
                    opened.index.apply(change.removed, change.added, change.vectors)
        except Exception:
            self.mark_incomplete(change.generation for change in changes)
            raise
        self._publish()

    def mark_incomplete(self, generations: Iterable[int]) -> None:
        """Have indexes compared with the document store, because they may lack a change."""
        with self._changed:
            self._incomplete.update(generations)

    @property
    def needs_recovery(self) -> bool:
        """Whether ``recover`` has something to do. Any thread asks."""
        with self._changed:
            return bool(self._incomplete) or any(
                opened.index.is_damaged for opened in self._open.values()
            )

    def complete(self) -> None:
        """Let indexes hold the committed changes that an error has kept from them."""
        for generation in tuple(self._incomplete):
            opened = self._open.get(generation)
            if opened is not None:
                self._reconcile(generation, opened.index)
                self._publish()
            with self._changed:
                self._incomplete.discard(generation)

    def recover(self) -> None:
        """Load damaged indexes again, and complete the others."""
        for generation, opened in tuple(self._open.items()):
            if opened.index.is_damaged:
                log.warning("index: damaged, loaded again generation=%d", generation)
                opened.index.load(self._batches(generation))
                self._publish()
                with self._changed:
                    self._incomplete.discard(generation)
        self.complete()

    def _publish(self) -> None:
        with self._changed:
            self._num_published += 1
            self._changed.notify_all()

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
        with self._changed:
            opened = self._open.get(generation)
            if opened is None:
                raise Unavailable("retriever", "the collection's index is being opened")
            opened.num_users += 1
        try:
            yield opened.index
        finally:
            with self._changed:
                opened.num_users -= 1
                is_last = opened.is_dropped and opened.num_users == 0
            if is_last:
                self._remove(generation, opened)

    def close(self) -> None:
        """Close all indexes. No search may run any more."""
        for opened in self._open.values():
            opened.index.close()
        self._open.clear()

    def _drop(self, generation: int) -> None:
        with self._changed:
            opened = self._open.pop(generation)
            opened.is_dropped = True
            is_unused = opened.num_users == 0
        if is_unused:
            self._remove(generation, opened)

    def _remove(self, generation: int, opened: _OpenIndex) -> None:
        opened.index.close()
        self._indexes.remove(generation)

    def _batches(self, generation: int) -> Iterator[tuple[Rows, Vectors]]:
        after = 0
        while True:
            rows, vectors = self._store.vectors_after(generation, after, RECONCILED_ROWS)
            if not len(rows):
                return
            yield rows, vectors
            after = int(rows[-1])

    def _reconcile(self, generation: int, index: RowIndex) -> None:
        """Let an index hold the rows of the document store: what it missed, and nothing else."""
        stored, indexed = self._store.rows(generation), index.rows()
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
            rows, vectors = self._store.vectors(generation, wanted.tolist())
            index.apply((), rows.tolist(), vectors)
        if len(surplus) or len(missing):
            log.info(
                "index: reconciled generation=%d removed=%d added=%d",
                generation,
                len(surplus),
                len(missing),
            )
