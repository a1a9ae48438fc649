"""Remembers which rows pass a filter, until the documents change."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from ragcache_core.retrieval.filters import Filter
from ragcache_retriever.knowledge_base.indexes import GenerationIndexes
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import Rows

MAX_BYTES = 64 << 20
"""Most bytes of rows. A million rows take 8 MiB."""


@dataclass(frozen=True, slots=True)
class _KeptRows:
    """Rows, and the version of the documents that they are no older than."""

    version: int
    rows: Rows


class FilterCache:
    """Rows by generation and filter. Any thread may call it.

    The filters of access by key recur in every search, and a broad one passes most rows. Where
    several processes change the documents, the store is asked before each use.
    """

    def __init__(
        self, store: DocumentStore, indexes: GenerationIndexes, max_bytes: int = MAX_BYTES
    ) -> None:
        self._store = store
        self._indexes = indexes
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # guards the two below
        self._kept: OrderedDict[tuple[int, Filter], _KeptRows] = OrderedDict()
        self._num_bytes = 0

    def allowed_rows(self, generation: int, wanted: Filter) -> Rows:
        """Return the sorted rows of a generation whose documents pass a filter."""
        key = (generation, wanted)
        # Read before the rows, so that a write in between makes them newer than their version.
        version = self._version(generation)
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and kept.version == version:
                self._kept.move_to_end(key)
                return kept.rows
        rows = self._store.allowed_rows(generation, wanted)
        with self._lock:
            self._remove(key)
            self._kept[key] = _KeptRows(version, rows)
            self._num_bytes += rows.nbytes
            while self._num_bytes > self._max_bytes:
                self._remove(next(iter(self._kept)))
        return rows

    def _version(self, generation: int) -> int:
        version = self._store.rows_version(generation)
        return self._indexes.num_published if version is None else version

    def _remove(self, key: tuple[int, Filter]) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._num_bytes -= kept.rows.nbytes
