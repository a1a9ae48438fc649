"""Re-encodes a value with another precision, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ragcache_core.identity.variant import Precision, ValuePart, ValueShape
from ragcache_kv.codecs import decode_part, encode_part, native_part_bytes
from ragcache_kv.values.layout import checksum


class CorruptValue(Exception):
    """A part does not match its checksum."""


def native_bytes(shape: ValueShape, num_tokens: int) -> int | None:
    """Return the size of a value as computed, or None for an unknown dtype."""
    try:
        return shape.num_layers * native_part_bytes(shape, num_tokens)
    except ValueError:
        return None


def re_encode_value(
    value: bytearray,
    parts: Sequence[ValuePart],
    shape: ValueShape,
    num_tokens: int,
    stored: Precision,
    target: Precision,
) -> list[memoryview]:
    """Return the parts of a value in another precision.

    Args:
        stored: Precision of value.

    Raises:
        CorruptValue: A part does not match its checksum. Encoding it would give wrong numbers a
            valid checksum.
    """
    whole = memoryview(value)
    start = 0
    views = []
    for part in parts:
        view = whole[start : start + part.num_bytes]
        start += part.num_bytes
        if view.nbytes != part.num_bytes or checksum(view) != part.checksum:
            raise CorruptValue
        native = decode_part(np.frombuffer(view, np.uint8), shape, num_tokens, stored)
        views.append(encode_part(native, shape, num_tokens, target).data)
    return views
