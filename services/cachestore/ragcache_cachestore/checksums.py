"""Whether bytes are what was put: the checksum of every part, wherever the bytes lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import xxhash

from ragcache_cachestore.value_file import ValueFile
from ragcache_core.extents import Extent
from ragcache_core.variant import Part

SLICE_BYTES = 1 << 20


class Check:
    """Checks the bytes of parts, one part after another, as they pass by.

    wrong: index of the first part that does not match its checksum; None while none is known.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.wrong: int | None = None
        self._parts = parts
        self._index = 0
        self._missing = parts[0].num_bytes if parts else 0
        self._hasher = xxhash.xxh3_64()

    def add(self, piece: memoryview) -> None:
        """The next bytes, cut anywhere."""
        while self._index < len(self._parts):
            taken, piece = piece[: self._missing], piece[self._missing :]
            self._hasher.update(taken)
            self._missing -= len(taken)
            if self._missing:
                return
            self._end_part()

    def finish(self) -> int | None:
        """There are no more bytes: the first wrong part, which one that is not whole is too."""
        if self.wrong is None and self._index < len(self._parts):
            self.wrong = self._index
        return self.wrong

    def _end_part(self) -> None:
        if self.wrong is None and self._hasher.intdigest() != self._parts[self._index].checksum:
            self.wrong = self._index
        self._index += 1
        if self._index < len(self._parts):
            self._missing = self._parts[self._index].num_bytes
            self._hasher.reset()


def first_wrong_part(parts: Sequence[Part], pieces: Iterable[memoryview]) -> int | None:
    """Index of the first part that does not match its checksum; None if all do.

    pieces: the bytes of the parts one after another, cut anywhere.
    """
    check = Check(parts)
    for piece in pieces:
        check.add(piece)
    return check.finish()


def read_slices(file: ValueFile, extents: Iterable[Extent]) -> Iterator[memoryview]:
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
