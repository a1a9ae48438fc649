"""Two threads that read one large value.

One thread cannot use the whole bandwidth of memory, and uses less than half of it when the kernel
copies files. A disk is also faster with several requests. All calls of a client share the second
thread. If it is busy or slow to wake up, the caller reads alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ragcache_core.identity.variant import ValuePart

MIN_PAIRED_BYTES = 4 << 20
"""Smallest value that two threads read faster than one."""

PIECE_BYTES = 1 << 20
"""Least bytes that a thread takes at once, in whole parts. A smaller copy would not bypass the CPU
caches."""

Read = Callable[[memoryview, int, Sequence[ValuePart]], bool]
"""Reads parts that begin at a byte of the value, and returns whether all are valid.

Both threads call it.
"""


class ReaderPair:
    """The caller's thread and one more. Safe for threads."""

    def __init__(self) -> None:
        self._second = ThreadPoolExecutor(1, "store reader")

    def close(self) -> None:
        """End the second thread after its current work. Callers then read alone."""
        self._second.shutdown(wait=False)

    def read(self, target: memoryview, start: int, parts: Sequence[ValuePart], read: Read) -> bool:
        """Read the parts that begin at byte start of the value. Return whether all are valid."""
        if len(target) < MIN_PAIRED_BYTES or len(parts) == 1:
            return read(target, start, parts)
        # Several threads can draw from the iterator of a list, but not from a generator.
        pieces = iter(_pieces(parts))

        def work() -> bool:
            all_valid = True
            for offset, num_bytes, piece in pieces:
                all_valid &= read(target[offset : offset + num_bytes], start + offset, piece)
            return all_valid

        try:
            second = self._second.submit(work)
        except RuntimeError:  # closed
            return work()
        try:
            first_valid = work()
        finally:
            # After this, no thread writes to the caller's memory.
            second_valid = second.cancel() or second.result()
        return first_valid and second_valid


def _pieces(parts: Sequence[ValuePart]) -> list[tuple[int, int, list[ValuePart]]]:
    """Group parts to pieces (start, bytes, parts) of at least PIECE_BYTES; the last may be less."""
    pieces: list[tuple[int, int, list[ValuePart]]] = []
    start, num_bytes, piece = 0, 0, []
    for part in parts:
        piece.append(part)
        num_bytes += part.num_bytes
        if num_bytes >= PIECE_BYTES:
            pieces.append((start, num_bytes, piece))
            start, num_bytes, piece = start + num_bytes, 0, []
    if piece:
        pieces.append((start, num_bytes, piece))
    return pieces
