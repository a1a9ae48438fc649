"""A connection whose running query ends when its caller no longer wants the result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

import psycopg
from psycopg.rows import TupleRow

T = TypeVar("T")

POLL_S = 0.005
"""Time between two questions whether a query is still wanted."""
_CANCEL_LIMIT_S = 5.0


class CancellableConnection(psycopg.Connection[TupleRow]):
    """A connection that asks while it waits for the server."""

    _is_cancelled: Callable[[], bool] | None = None

    @contextlib.contextmanager
    def cancelled_by(self, is_cancelled: Callable[[], bool] | None) -> Iterator[None]:
        """Cancel the queries that run inside as soon as the function returns True.

        A cancelled query raises psycopg.errors.QueryCanceled.
        """
        self._is_cancelled = is_cancelled
        try:
            yield
        finally:
            self._is_cancelled = None

    def wait(
        self, gen: Generator[Any, Any, T], interval: float = POLL_S, timeout: float | None = None
    ) -> T:
        """Wait for the server. See psycopg.Connection."""
        if self._is_cancelled is not None:
            gen = self._asking(gen, self._is_cancelled)
        return super().wait(gen, interval, timeout)

    def _asking(
        self, waiting: Generator[Any, Any, T], is_cancelled: Callable[[], bool]
    ) -> Generator[Any, Any, T]:
        """Yield what a generator of psycopg waits for, and cancel its query on the way."""
        has_cancelled = False
        try:
            wanted = next(waiting)
            while True:
                ready = yield wanted
                if not ready and not has_cancelled and is_cancelled():
                    has_cancelled = True
                    self.cancel_safe(timeout=_CANCEL_LIMIT_S)
                wanted = waiting.send(ready)
        except StopIteration as end:
            result: T = end.value
            return result
