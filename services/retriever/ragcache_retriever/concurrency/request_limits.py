"""Limits of concurrent requests, above which the retriever refuses instead of queueing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ragcache_core.errors import Overloaded

RETRY_AFTER_S = 1.0


class RequestLimits:
    """Counts running searches and the bytes of running upserts. One event loop uses it.

    Args:
        max_searches: Most searches at once.
        max_upsert_bytes: Most bytes of documents at once. One document runs alone if it is larger.
    """

    def __init__(self, max_searches: int, max_upsert_bytes: int) -> None:
        self._max_searches = max_searches
        self._max_upsert_bytes = max_upsert_bytes
        self._num_searches = 0
        self._upsert_bytes = 0

    @contextlib.contextmanager
    def search(self) -> Iterator[None]:
        """Count a search while the context is entered. Raises Overloaded above the limit."""
        if self._num_searches >= self._max_searches:
            raise Overloaded(
                "retriever", f"{self._num_searches} searches are running", RETRY_AFTER_S
            )
        self._num_searches += 1
        try:
            yield
        finally:
            self._num_searches -= 1

    @contextlib.contextmanager
    def upsert(self, num_bytes: int) -> Iterator[None]:
        """Count a document while the context is entered. Raises Overloaded above the limit."""
        if self._upsert_bytes and self._upsert_bytes + num_bytes > self._max_upsert_bytes:
            raise Overloaded(
                "retriever", f"it is preparing {self._upsert_bytes} bytes", RETRY_AFTER_S
            )
        self._upsert_bytes += num_bytes
        try:
            yield
        finally:
            self._upsert_bytes -= num_bytes
