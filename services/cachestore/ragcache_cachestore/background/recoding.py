"""A value from one precision into another, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ragcache_core.identity.variant import Precision, ValuePart, ValueShape
from ragcache_kv.codecs import decode_part, encode_part, native_part_bytes
from ragcache_kv.values.layout import checksum


class CorruptValue(Exception):
    """A part does not have the bytes that were put."""


def native_bytes(shape: ValueShape, num_tokens: int) -> int | None:
    """Size of a value as computed; None for a dtype that nothing is known of."""
    try:
        return shape.num_layers * native_part_bytes(shape, num_tokens)
    except ValueError:
        return None


def re_encode_value(
    value: bytearray,
    parts: Sequence[ValuePart],
    shape: ValueShape,
    num_tokens: int,
    held: Precision,
    target: Precision,
) -> list[memoryview]:
    """The parts of a value that is held so, encoded anew.

    Raises CorruptValue rather than give damaged numbers a checksum that holds.
    """
    whole = memoryview(value)
    start = 0
    views = []
    for part in parts:
        view = whole[start : start + part.num_bytes]
        start += part.num_bytes
        if view.nbytes != part.num_bytes or checksum(view) != part.checksum:
            raise CorruptValue
        native = decode_part(np.frombuffer(view, np.uint8), shape, num_tokens, held)
        views.append(encode_part(native, shape, num_tokens, target).data)
    return views
