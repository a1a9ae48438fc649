"""Limits for reading sources: disk space for downloads, and time for each source."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

from ragcache_core.errors import TooLarge, Unavailable


class Scratch:
    """A folder of bounded size, for all sources of one sync.

    Files are named by number, so that no external name becomes a local path.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._numbers = itertools.count()
        self.free_bytes = most_bytes

    def new_path(self, suffix: str = "") -> Path:
        """Return a new path."""
        return self._folder / f"{next(self._numbers)}{suffix}"

    def take(self, num_bytes: int, what: str) -> None:
        """Reserve bytes before they are written. Raises TooLarge with the field ``what``."""
        if num_bytes > self.free_bytes:
            raise TooLarge(
                what,
                f"with the sources before it takes more than {self._most_bytes >> 20} MiB",
                "name fewer documents, or spread them over several RagCollections",
            )
        self.free_bytes -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Return bytes that were deleted."""
        self.free_bytes += num_bytes


class Deadline:
    """A time limit."""

    def __init__(self, after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._after_s = after_s
        self._clock = clock
        self._at = clock() + after_s

    def left_s(self, what: str) -> float:
        """Return the seconds left. Raises Unavailable for ``what`` if there are none."""
        left_s = self._at - self._clock()
        if left_s <= 0:
            raise self.missed(what)
        return left_s

    def missed(self, what: str) -> Unavailable:
        """Return the error for a missed deadline."""
        return Unavailable(what, f"it took longer than {self._after_s:g} s")
