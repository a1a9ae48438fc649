"""Authentication tags: what proves that a client with the platform's key has computed a value.

A tag covers the bytes of a value, its names and all that a reader needs to understand it. So a
value cannot be changed, moved to another name or passed off as exact, neither on the store's volume
nor by the store.

A store may re-encode a value, and has no key. So a client also tags a value in each precision that
the platform's stores use. Encoding gives the same bytes on every machine.

The tag is a keyed BLAKE3 hash. HMAC-SHA256 and BLAKE2b take 8 and 20 times as long on a CPU with
AVX-512. GMAC and Poly1305 are faster still, but with them a nonce that is used twice gives the key
away. The checksums of the parts stay XXH3, with which a store finds damaged bytes without a key.

Source: https://github.com/BLAKE3-team/BLAKE3-specs, section 2.3 (keyed_hash).
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from blake3 import blake3
from typing_extensions import override

from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.store_key import StoreKey
from ragcache_core.identity.variant import (
    TAG_BYTES,
    Precision,
    ValueShape,
    ValueTags,
    VariantInfo,
)
from ragcache_core.store_api import NewVariant
from ragcache_kv.values.layout import ELEMENT_BYTES, FORMAT, value_parts
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
    try:
        tag = ValueTags.from_bytes(value.tag).of(value.info.precision)
    except ValueError:
        return False
    return hmac.compare_digest(hasher.digest(TAG_BYTES), tag)


class TaggedValue(OutgoingValue):
    """A value that is put with a tag. Its parts are hashed while the client waits for the next.

    Args:
        key: The platform's key.
        variant: What the value is of.
        value: The value.
        encodings: Precisions that the store may give to a native value. Each gets a tag, too,
            because the store has no key.
    """

    def __init__(
        self,
        key: StoreKey,
        variant: NewVariant,
        value: OutgoingValue,
        encodings: Sequence[Precision] = (),
    ) -> None:
        super().__init__(value.raw)
        self._key, self._variant = key, variant
        self._encodings = encodings if is_encodable(variant) else ()
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
        encodings = [(one, self._tag_in(one)) for one in self._encodings]
        return ValueTags(self._hasher.digest(TAG_BYTES), tuple(encodings)).to_bytes()

    def _tag_in(self, precision: Precision) -> bytes:
        """Encode the value as the store would, and return the tag of that."""
        # Imported here: it compiles loops, which a client of native values does not need.
        from ragcache_kv.codecs import encode_part  # noqa: PLC0415

        variant, shape = self._variant, self._variant.shape
        assert shape is not None
        whole = np.frombuffer(self.raw, np.uint8)
        if not whole.flags.writeable:
            whole = whole.copy()  # the codecs' loops take no read-only arrays
        layers = whole.reshape(shape.num_layers, -1)
        num_tokens = variant.info.num_tokens
        parts = [encode_part(layer, shape, num_tokens, precision) for layer in layers]
        sizes = [part.nbytes for part in parts]
        info = replace(variant.info, num_bytes=sum(sizes), precision=precision)
        hasher = _begin(self._key, variant.key, info, shape, variant.value_format)
        hasher.update(_packed(sizes))
        for part in parts:
            hasher.update(part.data)
        return hasher.digest(TAG_BYTES)

    def _hash_up_to(self, done: int) -> None:
        """Hash the first ``done`` parts. A caller may have started again at the first one."""
        start = self._position
        for size in self._sizes[self._hashed : done]:
            self._position += size
        self._hashed = max(self._hashed, done)
        if self._position > start:
            self._hasher.update(self.raw[start : self._position])


def is_encodable(variant: NewVariant) -> bool:
    """Tell whether a store can re-encode a value: native, and of a shape and format it knows."""
    shape, info = variant.shape, variant.info
    if shape is None or variant.value_format != FORMAT or info.precision != Precision():
        return False
    return shape.dtype in ELEMENT_BYTES and variant.part_bytes == value_parts(
        shape, info.num_tokens
    )


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
