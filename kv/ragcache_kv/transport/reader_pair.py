"""Two threads that read one large value.

One thread gets less of a machine's memory than there is, of the kernel's copies of files less than
half, and a disk likes to be asked for much at once. The second thread is there for all calls of a
client: where it is busy or slow to wake, the caller reads alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ragcache_core.identity.variant import ValuePart

MIN_PAIRED_BYTES = 4 << 20
"""From this size on it pays to wake somebody."""

PIECE_BYTES = 1 << 20
"""How much is taken at once, in whole parts. Less would not be copied past the caches."""

Read = Callable[[memoryview, int, Sequence[ValuePart]], bool]
"""Reads some parts to memory of their size, from their place in the value on; whether they were
good. Called by both threads."""


class ReaderPair:
    """The caller's thread and one more. Safe for threads."""

    def __init__(self) -> None:
        self._second = ThreadPoolExecutor(1, "store reader")

    def close(self) -> None:
        """End the second thread when it has done what it is at; callers then read alone."""
        self._second.shutdown(wait=False)

    def read(self, target: memoryview, start: int, parts: Sequence[ValuePart], read: Read) -> bool:
        """Read parts, which begin at start of the value, to target; whether all were good."""
        if len(target) < MIN_PAIRED_BYTES or len(parts) == 1:
            return read(target, start, parts)
        # A list's iterator, unlike a generator, can be drawn from by several threads.
        pieces = iter(_pieces(parts))

        def work() -> bool:
            good = True
            for offset, num_bytes, some in pieces:
                good &= read(target[offset : offset + num_bytes], start + offset, some)
            return good

        try:
            second = self._second.submit(work)
        except RuntimeError:  # closed
            return work()
        try:
            first_good = work()
        finally:
            # Nobody writes to the caller's memory after this.
            second_good = second.cancel() or second.result()
        return first_good and second_good


def _pieces(parts: Sequence[ValuePart]) -> list[tuple[int, int, list[ValuePart]]]:
    """(start, number of bytes, parts) of pieces of PIECE_BYTES or more; the last may be less."""
    pieces: list[tuple[int, int, list[ValuePart]]] = []
    start, num_bytes, some = 0, 0, []
    for part in parts:
        some.append(part)
        num_bytes += part.num_bytes
        if num_bytes >= PIECE_BYTES:
            pieces.append((start, num_bytes, some))
            start, num_bytes, some = start + num_bytes, 0, []
    if some:
        pieces.append((start, num_bytes, some))
    return pieces
