"""Which store shard owns a chunk: rendezvous hashing.

Every pair of a chunk and a member has a weight that depends on nothing else, and the member of the
greatest weight owns the chunk. So all who know the same members agree without talking, and a member
that comes or goes moves only the chunks that are or were its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from ragcache_core.identity.keys import KEY_BYTES, ChunkKey


class RendezvousHash:
    """Owners among members (any distinct names, in any order)."""

    def __init__(self, members: Iterable[str]) -> None:
        # Sorted, so that equal weights, too, have one winner everywhere.
        self.members = tuple(sorted(set(members)))
        digests = [
            hashlib.blake2b(name.encode(), digest_size=8, person=b"ragcache-shard").digest()
            for name in self.members
        ]
        self._seeds = np.frombuffer(b"".join(digests), dtype="<u8")

    def owners(self, chunks: Sequence[ChunkKey]) -> list[str]:
        """Owner of each chunk, in their order. Raises ValueError if there are no members."""
        return [self.members[place] for place in np.argmax(self._weights(chunks), axis=1)]

    def ranked(self, chunks: Sequence[ChunkKey], count: int) -> list[tuple[str, ...]]:
        """The count members of the greatest weights for each chunk, its owner first.

        Those after the owner are where its replicas go: should the owner leave, the second one is
        the owner. Fewer where there are fewer members. Raises ValueError if there are none.
        """
        weights = self._weights(chunks)
        # A stable sort of the negated order: equal weights have the winner that argmax gives.
        order = np.argsort(~weights, axis=1, kind="stable")[:, :count]
        return [tuple(self.members[place] for place in row) for row in order]

    def _weights(
        self, chunks: Sequence[ChunkKey]
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
        """[chunks, members]"""
        if not self.members:
            raise ValueError("nobody can own a chunk where there are no members")
        # A chunk's key is a hash already: its first half is as random as the whole.
        keys = np.frombuffer(b"".join(chunks), dtype="<u8")[:: KEY_BYTES // 8]
        return _mixed(keys[:, None] ^ self._seeds[None, :])


def _mixed(
    numbers: np.ndarray[tuple[int, ...], np.dtype[np.uint64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """64 bits to 64 bits so that every bit of a result hangs on every bit given (SplitMix64)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
