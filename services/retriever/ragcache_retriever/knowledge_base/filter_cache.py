"""Remembers which rows pass a filter, until the documents change."""

from __future__ import annotations

import threading
from collections import OrderedDict

from ragcache_core.retrieval.filters import Filter
from ragcache_retriever.knowledge_base.indexes import GenerationIndexes
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import Rows

MAX_BYTES = 64 << 20
"""Most bytes of rows. A million rows take 8 MiB."""


class FilterCache:
    """Rows by generation and filter. Any thread may call it.

    The filters of access by key recur in every search, and a broad one passes most rows.
    """

    def __init__(
        self, store: DocumentStore, indexes: GenerationIndexes, max_bytes: int = MAX_BYTES
    ) -> None:
        self._store = store
        self._indexes = indexes
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # guards the three below
        self._rows: OrderedDict[tuple[int, Filter], Rows] = OrderedDict()
        self._num_bytes = 0
        self._num_published = 0

    def allowed_rows(self, generation: int, wanted: Filter) -> Rows:
        """Return the sorted rows of a generation whose documents pass a filter."""
        key = (generation, wanted)
        num_published = self._indexes.num_published
        with self._lock:
            if self._num_published != num_published:
                self._rows.clear()
                self._num_bytes, self._num_published = 0, num_published
            elif key in self._rows:
                self._rows.move_to_end(key)
                return self._rows[key]
        rows = self._store.allowed_rows(generation, wanted)
        with self._lock:
            # A write since then may have changed what passes.
            if self._num_published == num_published and key not in self._rows:
                self._rows[key] = rows
                self._num_bytes += rows.nbytes
                while self._num_bytes > self._max_bytes:
                    self._num_bytes -= self._rows.popitem(last=False)[1].nbytes
        return rows
