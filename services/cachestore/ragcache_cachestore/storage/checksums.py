"""Checksums of values: the XXH3-64 of every part, in memory and on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import xxhash

from ragcache_cachestore.storage.disk_tier import DiskTier
from ragcache_core.identity.variant import ValuePart
from ragcache_core.storage.extents import Extent

SLICE_BYTES = 1 << 20


class PartChecksums:
    """XXH3-64 of consecutive parts, computed as their bytes arrive.

    Attributes:
        sums: Checksums of the parts that are complete.
        num_bytes: Number of bytes seen.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sums: list[int] = []
        self.num_bytes = 0
        self._sizes = sizes
        self._missing_bytes = sizes[0] if sizes else 0
        self._hasher = xxhash.xxh3_64()

    def add(self, piece: memoryview) -> None:
        """Add the next bytes, split anywhere."""
        self.num_bytes += len(piece)
        while len(self.sums) < len(self._sizes):
            taken, piece = piece[: self._missing_bytes], piece[self._missing_bytes :]
            self._hasher.update(taken)
            self._missing_bytes -= len(taken)
            if self._missing_bytes:
                return
            self.sums.append(self._hasher.intdigest())
            self._hasher.reset()
            if len(self.sums) < len(self._sizes):
                self._missing_bytes = self._sizes[len(self.sums)]

    def first_mismatch(self, checksums: Sequence[int]) -> int | None:
        """Return the index of the first complete part whose checksum differs."""
        pairs = enumerate(zip(self.sums, checksums, strict=False))
        return next((index for index, (found, expected) in pairs if found != expected), None)

    def first_mismatch_or_missing(self, checksums: Sequence[int]) -> int | None:
        """Return the index of the first part that differs or is incomplete."""
        mismatch = self.first_mismatch(checksums)
        if mismatch is None and len(self.sums) < len(self._sizes):
            return len(self.sums)
        return mismatch


def first_corrupt_part(parts: Sequence[ValuePart], pieces: Iterable[memoryview]) -> int | None:
    """Return the index of the first part that does not match its checksum.

    Args:
        pieces: The bytes of the parts in order, split anywhere.
    """
    sums = PartChecksums([part.num_bytes for part in parts])
    for piece in pieces:
        sums.add(piece)
    return sums.first_mismatch_or_missing([part.checksum for part in parts])


def read_slices(disk_tier: DiskTier, extents: Iterable[Extent]) -> Iterator[memoryview]:
    """Yield the bytes of extents on disk, and stop at the first one that cannot be read.

    Each slice is valid until the next one, because they share one buffer.
    """
    buffer = memoryview(bytearray(SLICE_BYTES))
    for extent in extents:
        for offset in range(0, extent.num_bytes, SLICE_BYTES):
            length = min(SLICE_BYTES, extent.num_bytes - offset)
            piece = Extent(extent.offset + offset, length)
            if not disk_tier.read_into([piece], [buffer[:length]]):
                return
            yield buffer[:length]
