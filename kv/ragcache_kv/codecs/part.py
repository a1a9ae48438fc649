"""Encodes and decodes one part of a value, which is one layer (format 2 of ``values.layout``).

A native part is the layer's KV, [2, tokens, kv_heads, head_dim] in C order. An encoded part has the
encoded keys and then the encoded values, without anything around them. The variant's info tells the
codecs, the shape and the number of tokens.

The loops of every function release the GIL, so several threads can encode and decode parts.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from ragcache_core.identity.variant import Codec, Precision, ValueShape
from ragcache_kv.codecs.numbers import NUMBERS, Bits, Bytes, Coder, Native, Number


def native_part_bytes(shape: ValueShape, num_tokens: int) -> int:
    """Return the size of one native layer. Raises ValueError for an unknown dtype."""
    return 2 * num_tokens * shape.num_kv_heads * shape.head_dim * _number(shape).num_bytes


def encoded_part_bytes(shape: ValueShape, num_tokens: int, precision: Precision) -> int:
    """Return the size of one encoded layer. Raises ValueError for ``packed``, whose size varies."""
    rows, number = num_tokens * shape.num_kv_heads, _number(shape)
    return sum(
        _coder(codec).num_bytes(rows, shape.head_dim, number)
        for codec in (precision.key, precision.value)
    )


def encode_part(part: Bytes, shape: ValueShape, num_tokens: int, precision: Precision) -> Bytes:
    """Encode the bytes of one native layer. Raises ValueError for another number of bytes."""
    number = _number(shape)
    bits = _numbers(_checked(part, native_part_bytes(shape, num_tokens)), number)
    keys, values = np.split(bits, 2)
    coded_keys = _coder(precision.key).encode(keys, shape.head_dim, number)
    coded_values = _coder(precision.value).encode(values, shape.head_dim, number)
    return np.concatenate([coded_keys, coded_values])


def decode_part(
    encoded: Bytes,
    shape: ValueShape,
    num_tokens: int,
    precision: Precision,
    out: Bytes | None = None,
) -> Bytes:
    """Decode one layer, into out if given.

    Raises:
        ValueError: encode_part cannot have written the bytes, or out has another size.
    """
    number, dim, rows = _number(shape), shape.head_dim, num_tokens * shape.num_kv_heads
    native_bytes = native_part_bytes(shape, num_tokens)
    result = np.empty(native_bytes, np.uint8) if out is None else _checked(out, native_bytes)
    key_coder, value_coder = _coder(precision.key), _coder(precision.value)
    key_bytes = key_coder.encoded_bytes(encoded, rows, dim, number)
    value_bytes = value_coder.encoded_bytes(encoded[key_bytes:], rows, dim, number)
    _checked(encoded, key_bytes + value_bytes)
    bits = _numbers(result, number)
    keys, values = np.split(bits, 2)
    key_coder.decode(encoded[:key_bytes], keys, dim, number)
    value_coder.decode(encoded[key_bytes:], values, dim, number)
    if not np.shares_memory(bits, result):
        result[:] = bits.view(np.uint8)
    return result


def warm_up(precision: Precision, shape: ValueShape) -> None:
    """Compile the codecs of a precision. Each one takes about half a second per direction."""
    part = np.zeros(native_part_bytes(shape, 1), np.uint8)
    decode_part(encode_part(part, shape, 1, precision), shape, 1, precision)


@cache
def _coder(codec: Codec) -> Coder:
    if codec is Codec.NATIVE:
        return Native()
    # Imported here: a process with only native values needs no numba.
    from ragcache_kv.codecs import grouped, gse, packed  # noqa: PLC0415

    coders: dict[Codec, Coder] = {
        Codec.PACKED: packed.PACKED,
        Codec.INT8: grouped.INT8,
        Codec.INT4: grouped.INT4,
        Codec.E4M3: grouped.E4M3,
        Codec.E5M2: grouped.E5M2,
        Codec.GSE8: gse.GSE8,
        Codec.GSE8_125: gse.GSE8_125,
        Codec.GSE8_134: gse.GSE8_134,
    }
    return coders[codec]


def _number(shape: ValueShape) -> Number:
    try:
        return NUMBERS[shape.dtype]
    except KeyError:
        raise ValueError(f"dtype {shape.dtype!r} is not one of {', '.join(NUMBERS)}") from None


def _checked(data: Bytes, num_bytes: int) -> Bytes:
    """Return data. Raises ValueError if it is not num_bytes contiguous bytes."""
    if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        raise ValueError("not a contiguous uint8 array of one dimension")
    if data.size != num_bytes:
        raise ValueError(f"{data.size} bytes instead of {num_bytes}")
    return data


def _numbers(native: Bytes, number: Number) -> Bits:
    """Return the bit patterns of a native part; a copy if it is not aligned."""
    aligned = native.ctypes.data % number.num_bytes == 0
    return (native if aligned else native.copy()).view(number.bits)
