"""A lock that many readers share and that one writer holds alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class ReadWriteLock:
    """Read-write lock for threads.

    A waiting writer goes before readers that arrive after it, so readers cannot starve it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._writer = False
        self._writers_waiting = 0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Share the lock with other readers. Do not nest it: a writer may wait in between."""
        with self._changed:
            self._changed.wait_for(lambda: not self._writer and not self._writers_waiting)
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock alone."""
        with self._changed:
            self._writers_waiting += 1
            self._changed.wait_for(lambda: not self._writer and self._readers == 0)
            self._writers_waiting -= 1
            self._writer = True
        try:
            yield
        finally:
            with self._changed:
                self._writer = False
                self._changed.notify_all()
