"""A value as pieces: cut once on arrival, then stored, kept and sent as they are.

The pieces are the parts of the wire, so a value in transit is never joined nor cut again.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from ragcache_core.errors import InvalidInput

PIECE_BYTES = 1 << 20
"""Size of every piece but the last; part of the format on disk. The rocksdict wheel holds Python's
lock while it writes, about 1 ms per MiB, so the piece is also how long other calls wait for it."""

Pieces = tuple[bytes, ...]


def checksum(pieces: Iterable[bytes]) -> int:
    """XXH3-64 of a value, equal to ``ragcache_kv.value.checksum`` of its pieces joined."""
    hasher = xxhash.xxh3_64()
    for piece in pieces:
        hasher.update(piece)
    return hasher.intdigest()


def count(num_bytes: int) -> int:
    """How many pieces a value of num_bytes has."""
    return -(-num_bytes // PIECE_BYTES)


class PieceCutter:
    """Cuts a stream of parts of any size into the pieces of a value of num_bytes."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._received = 0
        self._pieces: list[bytes] = []
        self._rest = bytearray()

    def add(self, part: bytes | memoryview) -> None:
        """Append part. Raises InvalidInput as soon as there is more than was announced."""
        self._received += len(part)
        if self._received > self._num_bytes:
            raise InvalidInput(
                "data",
                f"is longer than the {self._num_bytes} bytes announced",
                "send as many bytes as header.info.num_bytes says",
            )
        if len(part) == PIECE_BYTES and not self._rest:
            self._pieces.append(bytes(part))
            return
        self._rest += part
        while len(self._rest) >= PIECE_BYTES:
            self._pieces.append(bytes(self._rest[:PIECE_BYTES]))
            del self._rest[:PIECE_BYTES]

    def finish(self) -> Pieces:
        """The whole value. Raises InvalidInput if it is shorter than announced."""
        if self._received < self._num_bytes:
            raise InvalidInput(
                "data",
                f"has {self._received} of the {self._num_bytes} bytes announced",
                "send as many bytes as header.info.num_bytes says",
            )
        if self._rest:
            self._pieces.append(bytes(self._rest))
            self._rest = bytearray()
        return tuple(self._pieces)
