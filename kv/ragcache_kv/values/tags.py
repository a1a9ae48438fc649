"""Authentication tags: what proves that a client with the platform's key has computed a value.

A tag covers the bytes of a value, its names and all that a reader needs to understand it. So a
value cannot be changed, moved to another name or passed off as exact, neither on the store's volume
nor by the store.

The tag is a keyed BLAKE3 hash. HMAC-SHA256 and BLAKE2b take 8 and 20 times as long on a CPU with
AVX-512. GMAC and Poly1305 are faster still, but with them a nonce that is used twice gives the key
away. The checksums of the parts stay XXH3, with which a store finds damaged bytes without a key.

Source: https://github.com/BLAKE3-team/BLAKE3-specs, section 2.3 (keyed_hash).
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence

from blake3 import blake3
from typing_extensions import override

from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.store_key import StoreKey
from ragcache_core.identity.variant import TAG_BYTES, ValueShape, VariantInfo
from ragcache_core.store_api import NewVariant
from ragcache_kv.values.outgoing_value import OutgoingValue
from ragcache_kv.values.stored_value import StoredValue

_CONTEXT = b"ragcache-value-tag-1"
_NUMBERS = struct.Struct("<IQI?IIIIII")
_NO_SHAPE = ValueShape(0, 0, 0, "")


def is_authentic(key: StoreKey, name: VariantKey, value: StoredValue) -> bool:
    """Tell whether a client with the key has computed a value, under this name."""
    hasher = _begin(key, name, value.info, value.shape, value.value_format)
    hasher.update(_packed([part.num_bytes for part in value.parts]))
    hasher.update(value.value)
    return hmac.compare_digest(hasher.digest(TAG_BYTES), value.tag)


class TaggedValue(OutgoingValue):
    """A value that is put with a tag. Its parts are hashed while the client waits for the next.

    Args:
        key: The platform's key.
        variant: What the value is of.
        value: The value.
    """

    def __init__(self, key: StoreKey, variant: NewVariant, value: OutgoingValue) -> None:
        super().__init__(value.raw)
        self._value = value
        self._sizes = variant.part_bytes
        self._hasher = _begin(key, variant.key, variant.info, variant.shape, variant.value_format)
        self._hasher.update(_packed(self._sizes))
        self._hashed = 0
        self._position = 0

    @override
    def wait_for_parts(self, done: int, deadline: float) -> Sequence[int]:
        self._hash_up_to(done)  # not of the parts that are ready: the store may not want them
        return self._value.wait_for_parts(done, deadline)

    @override
    def wait_until_final(self, deadline: float) -> float:
        return self._value.wait_until_final(deadline)

    @override
    def tag(self) -> bytes:
        self._hash_up_to(len(self._sizes))
        return self._hasher.digest(TAG_BYTES)

    def _hash_up_to(self, done: int) -> None:
        """Hash the first ``done`` parts. A caller may have started again at the first one."""
        start = self._position
        for size in self._sizes[self._hashed : done]:
            self._position += size
        self._hashed = max(self._hashed, done)
        if self._position > start:
            self._hasher.update(self.raw[start : self._position])


def _packed(sizes: Sequence[int]) -> bytes:
    return struct.pack(f"<{1 + len(sizes)}Q", len(sizes), *sizes)


def _begin(
    key: StoreKey, name: VariantKey, info: VariantInfo, shape: ValueShape | None, value_format: int
) -> blake3:
    """Return a hasher that has seen all but the parts."""
    layers = shape or _NO_SHAPE
    dtype, precision = layers.dtype.encode(), str(info.precision).encode()
    hasher = blake3(_CONTEXT, key=key.tags)
    hasher.update(name.to_bytes())
    hasher.update(
        _NUMBERS.pack(
            info.num_tokens,
            info.num_bytes,
            info.base_position,
            info.provenance.exact,
            value_format,
            layers.num_layers,
            layers.num_kv_heads,
            layers.head_dim,
            len(dtype),
            len(precision),
        )
    )
    hasher.update(dtype + precision)
    return hasher
