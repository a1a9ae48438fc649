"""A file with one value that may change while processes read it.

A cluster mounts it from a ConfigMap or a Secret, so the value can change without restarts.
Kubernetes changes such a mount by swapping a symbolic link. The path then leads to another,
complete file.
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
"""Least time between two checks of the file."""

T = TypeVar("T")


class WatchedFile(Generic[T]):
    """The parsed value of a file. Safe for threads.

    A call of ``current`` checks the file at most every CHECK_EVERY_S. If the file cannot be read or
    parsed, the value stays as it was.

    Args:
        path: Path of the file.
        parse: Parses the content; raises InvalidInput.
        value: The value before the first check.
        name: Name of the value in log lines.
        describe: Describes a value in log lines.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        path: Path,
        parse: Callable[[bytes], T],
        value: T,
        *,
        name: str,
        describe: Callable[[T], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._parse = parse
        self._value = value
        self._name = name
        self._describe = describe
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: tuple[int, ...] | None = ()
        self._next_check_at = float("-inf")

    def current(self) -> T:
        """Return the current value. It is the same object while nothing has changed."""
        if self._clock() >= self._next_check_at:
            with self._lock:
                if self._clock() >= self._next_check_at:
                    self._reload()
                    self._next_check_at = self._clock() + CHECK_EVERY_S
        return self._value

    @property
    def is_stale(self) -> bool:
        """Whether the file could not be read or parsed at the last check."""
        return self._seen is None

    def _reload(self) -> None:
        try:
            state = self._path.stat()
            seen = (state.st_dev, state.st_ino, state.st_mtime_ns, state.st_size)
            if seen == self._seen:
                return
            # After stat, so that the next check notices a file that was swapped in between.
            value = self._parse(self._path.read_bytes())
        except (OSError, InvalidInput) as error:
            seen_before, self._seen = self._seen, None
            if seen_before is not None:
                log.warning(
                    "watched file: reload failed name=%s kept=%s error=%s",
                    self._name,
                    self._describe(self._value),
                    error,
                )
            return
        self._seen = seen
        if value != self._value:
            log.info("watched file: loaded name=%s value=%s", self._name, self._describe(value))
            self._value = value
