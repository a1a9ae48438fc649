"""A bounded memory of why variants are no longer stored."""

from __future__ import annotations

from collections import OrderedDict

from ragcache_core.identity.keys import ChunkKey, VariantKey
from ragcache_core.identity.variant import Miss

CAPACITY = 65_536
"""Number of reasons kept, in about 10 MiB."""


class MissReasons:
    """Miss reasons by 64 bits of a key. The oldest are dropped. The store's lock guards it."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._reasons: OrderedDict[bytes, Miss] = OrderedDict()

    def __len__(self) -> int:
        return len(self._reasons)

    def note(self, key: VariantKey, reason: Miss) -> None:
        """Note why a variant was dropped. This also becomes the reason of its chunk."""
        for name in (_variant_name(key), _chunk_name(key.chunk)):
            self._reasons[name] = reason
            self._reasons.move_to_end(name)
        while len(self._reasons) > self._capacity:
            self._reasons.popitem(last=False)

    def of_variant(self, key: VariantKey) -> Miss:
        """Return why a variant is not stored."""
        return self._reasons.get(_variant_name(key), Miss.NEVER_STORED)

    def of_chunk(self, chunk: ChunkKey) -> Miss:
        """Return why no variant of a chunk is stored."""
        return self._reasons.get(_chunk_name(chunk), Miss.NEVER_STORED)


def _variant_name(key: VariantKey) -> bytes:
    # Both keys are hashes, so any of their bytes will do.
    return key.chunk[-5:] + key.prefix[-4:]


def _chunk_name(chunk: ChunkKey) -> bytes:
    return chunk[-8:]
