"""Which shard owns a chunk: rendezvous hashing.

Each pair of a chunk and a member has a weight that depends on nothing else. The member with the
greatest weight owns the chunk. So all clients that know the same members agree without
communication. A member that joins or leaves moves only its own chunks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from ragcache_core.identity.keys import KEY_BYTES, ChunkKey


class RendezvousHash:
    """Maps chunks to members. Members are distinct names, in any order."""

    def __init__(self, members: Iterable[str]) -> None:
        # Sorted, so that equal weights have the same winner everywhere.
        self.members = tuple(sorted(set(members)))
        digests = [
            hashlib.blake2b(name.encode(), digest_size=8, person=b"ragcache-shard").digest()
            for name in self.members
        ]
        self._seeds = np.frombuffer(b"".join(digests), dtype="<u8")

    def owners(self, chunks: Sequence[ChunkKey]) -> list[str]:
        """Return the owner of each chunk, in their order.

        Raises:
            ValueError: There are no members.
        """
        return [self.members[index] for index in np.argmax(self._weights(chunks), axis=1)]

    def ranked(self, chunks: Sequence[ChunkKey], count: int) -> list[tuple[str, ...]]:
        """Return the count members with the greatest weights of each chunk, its owner first.

        Copies go to the members after the owner. If the owner leaves, the second one becomes the
        owner. With fewer members all are returned.

        Raises:
            ValueError: There are no members.
        """
        weights = self._weights(chunks)
        # A stable sort of the negated order: equal weights have the winner that argmax gives.
        order = np.argsort(~weights, axis=1, kind="stable")[:, :count]
        return [tuple(self.members[index] for index in row) for row in order]

    def _weights(
        self, chunks: Sequence[ChunkKey]
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
        """Return [chunks, members]."""
        if not self.members:
            raise ValueError("a chunk has no owner: there are no members")
        # A chunk's key is a hash, so its first half is random enough.
        keys = np.frombuffer(b"".join(chunks), dtype="<u8")[:: KEY_BYTES // 8]
        return _mixed(keys[:, None] ^ self._seeds[None, :])


def _mixed(
    numbers: np.ndarray[tuple[int, ...], np.dtype[np.uint64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """Map 64 bits to 64 bits so that each output bit depends on each input bit (SplitMix64)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
