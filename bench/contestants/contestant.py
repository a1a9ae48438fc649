"""The interface of a compared store, and the values that it stores."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

POOL_BYTES = 96 << 20
"""Sizes of the source and target pools, far larger than a CPU's cache."""


class Absent(Exception):
    """The store is not installed or does not start; the message says why."""


class Contestant(ABC):
    """One store, opened in its own process. Raises Absent if that fails."""

    verifies = False
    """Whether ``get`` compares checksums itself; other stores are checked after it."""

    counts = True
    """Whether the last get was of the measured kind."""

    @abstractmethod
    def __init__(self, folder: Path) -> None: ...

    def prepare_put(self, number: int, value: memoryview) -> None:  # noqa: B027
        """Do untimed work that a caller with registered memory would not do."""

    def prepare_get(self, number: int) -> None:  # noqa: B027
        """Do the untimed steps before a get in the store's own protocol."""

    @abstractmethod
    def put(self, number: int, value: memoryview) -> None:
        """Store a value under a number; return when a get would find it."""

    @abstractmethod
    def get(self, number: int, buffer: memoryview) -> memoryview | None:
        """Put every byte of a value into the caller's own buffer.

        Returns:
            None, or another buffer of the caller with the bytes.
        """

    def settle(self) -> None:  # noqa: B027
        """Finish the background work of puts."""

    def close(self) -> None:  # noqa: B027
        """Stop everything that was started."""


def page_aligned(num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Allocate zeroed, page-aligned memory, like large tensors of an engine."""
    room = np.zeros(num_bytes + mmap.PAGESIZE, dtype=np.uint8)
    start = -room.ctypes.data % mmap.PAGESIZE
    return room[start : start + num_bytes]


class Values:
    """Distinct values of one size: windows into random bytes."""

    def __init__(self, num_bytes: int, seed: int) -> None:
        self._num_bytes = num_bytes
        self._pool = np.random.default_rng(seed).integers(
            0, 256, POOL_BYTES + num_bytes, dtype=np.uint8
        )
        self._buffers = page_aligned(POOL_BYTES)

    def value(self, number: int) -> memoryview:
        # An odd stride makes all values different and uses all of the pool.
        start = number * (self._num_bytes + 4099) % POOL_BYTES
        return self._pool[start : start + self._num_bytes].data.cast("B")

    def buffer(self, number: int) -> memoryview:
        """Return a target buffer; buffers rotate, so that none stays in the CPU's cache."""
        start = number * self._num_bytes % (POOL_BYTES - self._num_bytes + 1)
        return self._buffers[start : start + self._num_bytes].data.cast("B")

    def checksum(self, number: int) -> int:
        """Return the XXH3-64 checksum of a value."""
        return xxhash.xxh3_64_intdigest(self.value(number))
