"""Why a variant is not there: a bounded memory of what went, and for which reason."""

from __future__ import annotations

from collections import OrderedDict

from ragcache_core.identity.keys import ChunkKey, VariantKey
from ragcache_core.identity.variant import Miss

CAPACITY = 65_536
"""How many are remembered; about 10 MiB."""


class MissReasons:
    """Reasons by 64 bits of a key; the oldest are forgotten. Under the store's lock."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._reasons: OrderedDict[bytes, Miss] = OrderedDict()

    def __len__(self) -> int:
        return len(self._reasons)

    def note(self, key: VariantKey, reason: Miss) -> None:
        """Key is gone for a reason. The last reason holds, for the variant and for its chunk."""
        for name in (_of_variant(key), _of_chunk(key.chunk)):
            self._reasons[name] = reason
            self._reasons.move_to_end(name)
        while len(self._reasons) > self._capacity:
            self._reasons.popitem(last=False)

    def miss_reason(self, key: VariantKey) -> Miss:
        """Why key is not held, as far as is remembered."""
        return self._reasons.get(_of_variant(key), Miss.NEVER_STORED)

    def chunk_miss_reason(self, chunk: ChunkKey) -> Miss:
        """Why no variant of chunk is held, as far as is remembered."""
        return self._reasons.get(_of_chunk(chunk), Miss.NEVER_STORED)


def _of_variant(key: VariantKey) -> bytes:
    # Both keys are hashes: any bytes of them are as good as others.
    return key.chunk[-5:] + key.prefix[-4:]


def _of_chunk(chunk: ChunkKey) -> bytes:
    return chunk[-8:]
