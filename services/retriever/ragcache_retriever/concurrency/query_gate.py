"""Lets queries go before the work of ingestion in this process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

MIN_WORK_S = 0.005
MAX_WAIT_S = 0.1
"""Queries without end slow ingestion to MIN_WORK_S of work in this time, and do not stop it."""


class QueryGate:
    """Pauses threads that prepare documents while a query is answered.

    Without it, a query would share the cores with them, and wait for Python's lock at each step.

    Args:
        clock: Monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._num_queries = 0
        self._local = threading.local()

    @contextlib.contextmanager
    def query(self) -> Iterator[None]:
        """Pause the other work meanwhile. Any thread may enter it, several at once."""
        with self._changed:
            self._num_queries += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_queries -= 1
                self._changed.notify_all()

    def wait(self) -> None:
        """Wait while queries are answered, at most MAX_WAIT_S. Call it every few milliseconds."""
        if not self._num_queries:
            return
        resumed_s: float = getattr(self._local, "resumed_s", -MAX_WAIT_S)
        if self._clock() - resumed_s < MIN_WORK_S:
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._num_queries, MAX_WAIT_S)
        self._local.resumed_s = self._clock()
