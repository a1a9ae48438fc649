"""Moves values between the caller's memory and a store's, and verifies every byte.

A value is one run of bytes. ``parts`` divide it into layers with a checksum each. ``sources`` or
``targets`` divide it into the buffers that it comes from or goes to. The two may differ.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import xxhash

from ragcache_core.identity.variant import ValuePart

BLOCK_BYTES = 1 << 20
"""Bytes that are copied before they are verified.

From about this size on, libc's memcpy bypasses the CPU caches. That doubles its speed for values
larger than the caches, which gains more than verifying smaller blocks from the cache.
"""

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes. A target must be writable."""


def checksum_of(data: Buffer) -> int:
    """Return the XXH3-64 of data. It releases the GIL."""
    return xxhash.xxh3_64_intdigest(data)


def checksummed_parts(value: memoryview, sizes: Sequence[int]) -> tuple[ValuePart, ...]:
    """Return the parts of a value with their checksums."""
    parts, start = [], 0
    for size in sizes:
        parts.append(ValuePart(size, checksum_of(value[start : start + size])))
        start += size
    return tuple(parts)


class Verifier:
    """Compares the bytes of a value, which arrive in order, with the checksums of its parts.

    Attributes:
        good: Whether every complete part matches its checksum.
    """

    def __init__(self, parts: Sequence[ValuePart]) -> None:
        self.good = True
        self._parts = iter(parts)
        self._hasher = xxhash.xxh3_64()
        self._part: ValuePart | None = None
        self._missing_bytes = 0
        self._next()

    @property
    def complete(self) -> bool:
        """Whether the last byte has arrived."""
        return self._part is None

    def add(self, data: memoryview) -> None:
        """Add the next bytes. Bytes after the last part make the value invalid."""
        start, end = 0, len(data)
        while start < end:
            part, missing = self._part, self._missing_bytes
            if part is None:
                self.good = False
                return
            if missing == part.num_bytes <= end - start:  # a whole part needs no state
                self._check(checksum_of(data[start : start + missing]))
                start += missing
                self._next()
                continue
            step = min(missing, end - start)
            self._hasher.update(data[start : start + step])
            start += step
            self._missing_bytes -= step
            if not self._missing_bytes:
                self._check(self._hasher.intdigest())
                self._hasher.reset()
                self._next()

    def _check(self, checksum: int) -> None:
        if self._part is not None and checksum != self._part.checksum:
            self.good = False

    def _next(self) -> None:
        self._part = next(self._parts, None)
        while self._part is not None and not self._part.num_bytes:
            self._check(checksum_of(b""))
            self._part = next(self._parts, None)
        self._missing_bytes = 0 if self._part is None else self._part.num_bytes


def copy(target: memoryview, source: memoryview) -> None:
    """Copy as many bytes as target has. It releases the GIL, unlike a slice assignment."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def blocks(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of blocks of BLOCK_BYTES. The last one has up to twice as much."""
    start = 0
    while num_bytes - start >= 2 * BLOCK_BYTES:
        yield start, start + BLOCK_BYTES
        start += BLOCK_BYTES
    if start < num_bytes:
        yield start, num_bytes


def copy_verified(
    target: memoryview, sources: Iterable[memoryview], parts: Sequence[ValuePart]
) -> bool:
    """Copy sources, one after another, to target. Return whether every part matches.

    Each block is verified in target right after the copy. The result therefore holds for the bytes
    that the caller has, even if the source changes meanwhile.
    """
    sources = list(sources)
    if (
        len(sources) == len(parts) == 1 and len(sources[0]) < 2 * BLOCK_BYTES
    ):  # one block needs no state
        block = target[: len(sources[0])]
        copy(block, sources[0])
        return len(block) == parts[0].num_bytes and checksum_of(block) == parts[0].checksum
    verifier = Verifier(parts)
    position = 0
    for source in sources:
        for start, end in blocks(len(source)):
            block = target[position : position + end - start]
            copy(block, source[start:end])
            verifier.add(block)
            position += end - start
        if not verifier.good:
            return False
    return verifier.complete and verifier.good


def read_verified(
    target: memoryview, fd: int, extents: Iterable[tuple[int, int]], parts: Sequence[ValuePart]
) -> bool:
    """Copy extents (offset, number of bytes) of a file as copy_verified. Raises OSError."""
    verifier = Verifier(parts)
    position = 0
    for offset, num_bytes in extents:
        for start, end in blocks(num_bytes):
            block = target[position : position + end - start]
            if not read_into(block, fd, offset + start):
                return False
            verifier.add(block)
            position += end - start
        if not verifier.good:
            return False
    return verifier.complete and verifier.good


def read_into(target: memoryview, fd: int, offset: int) -> bool:
    """Fill target from a file. Return False if the file ends too early. Raises OSError."""
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done:]], offset + done)
        if not count:
            return False
        done += count
    return True


def write_from(source: memoryview, fd: int, offset: int) -> None:
    """Write all of source to a file. Raises OSError."""
    done = 0
    while done < len(source):
        done += os.pwrite(fd, source[done:], offset + done)


def scatter(value: memoryview, targets: Iterable[memoryview]) -> None:
    """Copy a value to targets, one after another."""
    position = 0
    for target in targets:
        for start, end in blocks(len(target)):
            copy(target[start:end], value[position : position + end - start])
            position += end - start


def slice_views(views: Sequence[memoryview], start: int, num_bytes: int) -> list[memoryview]:
    """Return num_bytes from start on, of the bytes that views form together."""
    pieces = []
    for view in views:
        if not num_bytes:
            break
        if start >= len(view):
            start -= len(view)
            continue
        piece = view[start : start + num_bytes]
        pieces.append(piece)
        num_bytes -= len(piece)
        start = 0
    return pieces
