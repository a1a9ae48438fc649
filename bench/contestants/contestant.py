"""What every compared store can do, and the values that it is asked to hold."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

POOL_BYTES = 96 << 20
"""Bytes that values are cut from, and bytes that they are read into: far beyond a CPU's cache."""


class Absent(Exception):
    """The store is not installed, or does not start here; says why."""


class Contestant(ABC):
    """One store, opened in its own process. Raises Absent when it cannot be."""

    verifies = False
    """Whether get has compared every byte's checksum itself; the others are checked after it."""

    counts = True
    """Whether the get that has just ended was of the kind that is measured."""

    @abstractmethod
    def __init__(self, folder: Path) -> None: ...

    def prepare_put(self, number: int, value: memoryview) -> None:  # noqa: B027
        """Whatever a caller whose data lies where the store wants it need not do; not timed."""

    def prepare_get(self, number: int) -> None:  # noqa: B027
        """What goes before a get in the store's own protocol; not timed."""

    @abstractmethod
    def put(self, number: int, value: memoryview) -> None:
        """Store a value in place of any that number had; returns once a get would find it."""

    @abstractmethod
    def get(self, number: int, buffer: memoryview) -> memoryview | None:
        """Put every byte of a value into the caller's own buffer.

        None, or another buffer of the caller's that the bytes are in.
        """

    def settle(self) -> None:  # noqa: B027
        """Finish what puts left to the background."""

    def close(self) -> None:  # noqa: B027
        """End what was started."""


def page_aligned(num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Zeroed memory that begins at a page, as an engine's tensors of that size do."""
    room = np.zeros(num_bytes + mmap.PAGESIZE, dtype=np.uint8)
    start = -room.ctypes.data % mmap.PAGESIZE
    return room[start : start + num_bytes]


class Values:
    """Distinct values of one size: windows of random bytes at offsets of their own."""

    def __init__(self, num_bytes: int, seed: int) -> None:
        self._num_bytes = num_bytes
        self._pool = np.random.default_rng(seed).integers(
            0, 256, POOL_BYTES + num_bytes, dtype=np.uint8
        )
        self._buffers = page_aligned(POOL_BYTES)

    def value(self, number: int) -> memoryview:
        """Bytes of a value."""
        # An odd stride, so that no two values are equal and all of the pool is used.
        start = number * (self._num_bytes + 4099) % POOL_BYTES
        return memoryview(self._pool[start : start + self._num_bytes]).cast("B")

    def buffer(self, number: int) -> memoryview:
        """Where to read a value to; buffers take turns, so that none stays in the CPU's cache."""
        start = number * self._num_bytes % (POOL_BYTES - self._num_bytes + 1)
        return memoryview(self._buffers[start : start + self._num_bytes]).cast("B")

    def checksum(self, number: int) -> int:
        """XXH3-64 of a value."""
        return xxhash.xxh3_64_intdigest(self.value(number))
