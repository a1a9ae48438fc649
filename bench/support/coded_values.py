"""Whole values, encoded and decoded layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ragcache_core.identity.variant import Precision, ValueShape
from ragcache_kv.codecs import decode_part, encode_part
from ragcache_kv.codecs.numbers import Bytes


def encode_value(
    value: Bytes, shape: ValueShape, num_tokens: int, precision: Precision
) -> list[Bytes]:
    """Encode the layers of a native value."""
    layers = value.reshape(shape.num_layers, -1)
    return [encode_part(layer, shape, num_tokens, precision) for layer in layers]


def decode_value(
    parts: Sequence[Bytes],
    shape: ValueShape,
    num_tokens: int,
    precision: Precision,
    out: Bytes | None = None,
) -> Bytes:
    """Decode the parts of a value, into out if given."""
    if out is None:
        return np.concatenate([decode_part(one, shape, num_tokens, precision) for one in parts])
    for one, layer in zip(parts, out.reshape(shape.num_layers, -1), strict=True):
        decode_part(one, shape, num_tokens, precision, layer)
    return out
