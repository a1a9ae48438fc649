"""Whether bytes are what was put: the checksum of every part, wherever the bytes lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import xxhash

from ragcache_cachestore.storage.disk_tier import DiskTier
from ragcache_core.identity.variant import ValuePart
from ragcache_core.storage.extents import Extent

SLICE_BYTES = 1 << 20


class PartChecksums:
    """XXH3-64 of parts whose sizes are given, one part after another, as their bytes pass by.

    sums: of those that are whole so far. num_bytes: that have passed.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sums: list[int] = []
        self.num_bytes = 0
        self._sizes = sizes
        self._missing = sizes[0] if sizes else 0
        self._hasher = xxhash.xxh3_64()

    def add(self, piece: memoryview) -> None:
        """The next bytes, cut anywhere."""
        self.num_bytes += len(piece)
        while len(self.sums) < len(self._sizes):
            taken, piece = piece[: self._missing], piece[self._missing :]
            self._hasher.update(taken)
            self._missing -= len(taken)
            if self._missing:
                return
            self.sums.append(self._hasher.intdigest())
            self._hasher.reset()
            if len(self.sums) < len(self._sizes):
                self._missing = self._sizes[len(self.sums)]

    def first_mismatch(self, checksums: Sequence[int]) -> int | None:
        """Index of the first part, of those that are whole, that has another one."""
        pairs = enumerate(zip(self.sums, checksums, strict=False))
        return next((index for index, (found, wanted) in pairs if found != wanted), None)

    def first_mismatch_or_missing(self, checksums: Sequence[int]) -> int | None:
        """There are no more bytes: the first wrong part, which one that is not whole is too."""
        wrong = self.first_mismatch(checksums)
        if wrong is None and len(self.sums) < len(self._sizes):
            return len(self.sums)
        return wrong


def first_corrupt_part(parts: Sequence[ValuePart], pieces: Iterable[memoryview]) -> int | None:
    """Index of the first part that does not match its checksum; None if all do.

    pieces: the bytes of the parts one after another, cut anywhere.
    """
    sums = PartChecksums([part.num_bytes for part in parts])
    for piece in pieces:
        sums.add(piece)
    return sums.first_mismatch_or_missing([part.checksum for part in parts])


def read_slices(file: DiskTier, extents: Iterable[Extent]) -> Iterator[memoryview]:
    """The bytes of extents of a file; ends early where they cannot be read.

    Each slice is good until the next: they share one buffer.
    """
    buffer = memoryview(bytearray(SLICE_BYTES))
    for extent in extents:
        for offset in range(0, extent.num_bytes, SLICE_BYTES):
            length = min(SLICE_BYTES, extent.num_bytes - offset)
            if not file.read_into([Extent(extent.offset + offset, length)], [buffer[:length]]):
                return
            yield buffer[:length]
