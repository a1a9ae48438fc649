"""A file that says one thing and may change under whoever asks.

A cluster mounts it from a ConfigMap or a Secret, so that what it says can change without a restart
of anybody. Kubernetes changes such a mount by swapping a symbolic link: what the path leads to is
another file then, whole at any instant.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from ragcache_core.errors import InvalidInput

log = logging.getLogger("ragcache.files")

CHECK_EVERY_S = 1.0

T = TypeVar("T")


class WatchedFile(Generic[T]):
    """What a file says, by parse; safe to share between threads.

    It is looked at when somebody asks, at most every CHECK_EVERY_S. A file that cannot be read as
    it should, which parse says by InvalidInput, leaves everything as it was.
    name, words: what log lines call it, and say of a value. value: before the first look.
    """

    def __init__(
        self,
        path: Path,
        parse: Callable[[bytes], T],
        value: T,
        *,
        name: str,
        words: Callable[[T], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._parse = parse
        self._value = value
        self._name = name
        self._words = words
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: tuple[int, ...] | None = ()
        self._next_look = float("-inf")

    def current(self) -> T:
        """What it says now; the same object while nothing has changed."""
        if self._clock() >= self._next_look:
            with self._lock:
                if self._clock() >= self._next_look:
                    self._look()
                    self._next_look = self._clock() + CHECK_EVERY_S
        return self._value

    def _look(self) -> None:
        try:
            state = self._path.stat()
            seen = (state.st_dev, state.st_ino, state.st_mtime_ns, state.st_size)
            if seen == self._seen:
                return
            # Read only now: a file swapped in between is seen as changed by the next look.
            value = self._parse(self._path.read_bytes())
        except (OSError, InvalidInput) as error:
            seen_before, self._seen = self._seen, None
            if seen_before is not None:
                log.warning("%s stay %s: %s", self._name, self._words(self._value), error)
            return
        self._seen = seen
        if value != self._value:
            log.info("%s: %s", self._name, self._words(value))
            self._value = value
