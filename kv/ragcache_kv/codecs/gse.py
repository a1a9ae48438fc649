"""GSE-8: eight bits with a shared exponent.

A code has one sign bit, the index of a shared exponent, and a fraction with an explicit leading 1:
fraction x 2^(shared exponent - fraction bits + 1). A number uses the smallest shared exponent that
is not below its own. The larger the difference, the more leading zeros the fraction has.

The shared exponents are (fraction bits - 1) apart. Every number in range therefore has at least one
bit after its leading 1. The highest shared exponent is that of the largest number. As in the paper,
they are the right ends of equal steps down from the top of the range. The range is that of the keys
or the values of one layer.

Two details differ from the paper. Numbers are rounded to the nearest, not truncated. Numbers below
the lowest shared exponent keep fewer bits, rounded to the nearest.

Encoded: the lowest shared exponent (int16), then the codes. If any number is not finite, all
numbers decode as NaN, since they share the exponents.

HA-RAG finds the split 1+4+3 (``gse8``) best of the three (section III-B1). On KV of the bundled
model ``bench/codecs.py`` finds it worst and 1+2+5 best, by mean and by median error. There, one
more bit of the fraction helps more than twice as many shared exponents.

Source: HA-RAG, section II-B2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from typing_extensions import override

from ragcache_kv.codecs.kernels import (
    Kernel,
    bits_of,
    compiled,
    f32,
    float_of,
    i32,
    inlined,
    loader,
    normalizer,
    u8,
    u16,
    u32,
)
from ragcache_kv.codecs.numbers import BFLOAT16, Bits, Bytes, Coder, Floats, Number, narrow, widen

NOT_FINITE = 0x7FFF
"""Marks numbers that are not finite, instead of the lowest shared exponent."""
_HEAD_BYTES = 2


@dataclass(frozen=True, slots=True)
class Gse(Coder):
    """GSE-8 with index_bits bits for the index."""

    index_bits: int

    @property
    def fraction_bits(self) -> int:
        """Bits of the fraction, including the leading 1."""
        return 7 - self.index_bits

    @property
    def step(self) -> int:
        """Difference of two neighbouring shared exponents."""
        return self.fraction_bits - 1

    def num_bytes(self, rows: int, dim: int, _number: Number) -> int:
        """Return the encoded size, which is the same for every dtype."""
        return _HEAD_BYTES + rows * dim

    @override
    def encode(self, bits: Bits, dim: int, number: Number) -> Bytes:
        wide = number is not BFLOAT16
        if wide:
            bits = widen(bits, number).view(np.uint32)
        encoded = np.empty(self.num_bytes(bits.size // dim, dim, number), np.uint8)
        largest = np.zeros(1, bits.dtype)
        _largest_kernel(wide)(bits, largest)
        most = widen(largest, BFLOAT16)[0] if not wide else largest.view(np.float32)[0]
        if not np.isfinite(most):
            encoded[:] = 0
            encoded[:_HEAD_BYTES] = np.array([NOT_FINITE], "<i2").view(np.uint8)
            return encoded
        lowest = self._lowest(float(most), number)
        encoded[:_HEAD_BYTES] = np.array([lowest], "<i2").view(np.uint8)
        kernel = _encode_kernel(wide, self.fraction_bits)
        kernel(bits, encoded[_HEAD_BYTES:], lowest, np.float32(number.limit))
        return encoded

    @override
    def decode(self, encoded: Bytes, out: Bits, _dim: int, number: Number) -> None:
        lowest = int(encoded[:_HEAD_BYTES].copy().view("<i2")[0])
        codes = encoded[_HEAD_BYTES:]
        if lowest == NOT_FINITE:
            out[:] = narrow(np.full(1, np.nan, np.float32), number)[0]
        elif not -126 <= lowest - self.step <= 127:
            raise ValueError("GSE-8: the lowest shared exponent is out of range")
        elif number is BFLOAT16:
            least = np.uint16((lowest - self.step + 127) << 7)
            _decode_kernel(self.fraction_bits)(codes, out, least)
        else:
            with np.errstate(over="ignore"):  # codes above the largest number are unused
                out[:] = narrow(self.table(lowest), number)[codes]

    def table(self, lowest: int) -> Floats:
        """Return the number of each of the 256 codes, for a lowest shared exponent."""
        code = np.arange(256)
        index = (code & 0x7F) >> self.fraction_bits
        fraction = code & ((1 << self.fraction_bits) - 1)
        magnitude = np.ldexp(fraction.astype(float), lowest + self.step * index - self.step)
        with np.errstate(over="ignore"):
            return np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)

    def _lowest(self, most: float, number: Number) -> int:
        """Return the lowest shared exponent for a largest magnitude of most."""
        least = number.least + self.step
        if most == 0:
            return least
        top = int(np.frexp(min(most, number.limit))[1]) - 1
        return max(top - self.step * ((1 << self.index_bits) - 1), least)


GSE8_125 = Gse(2)
GSE8_134 = Gse(3)
GSE8 = Gse(4)


@cache
def _largest_kernel(wide: bool) -> Kernel:
    bits_type, magnitude = (u32, 0x7FFFFFFF) if wide else (u16, 0x7FFF)

    def largest(bits: Any, result: Any) -> None:
        most = bits_type(0)
        for i in range(bits.size):
            most = max(most, bits_type(bits[i] & bits_type(magnitude)))
        result[0] = most

    return compiled(bits_type[::1], bits_type[::1])(largest)


@cache
def _encode_kernel(wide: bool, fraction_bits: int) -> Kernel:
    load = loader(wide)
    step = fraction_bits - 1
    full = 1 << fraction_bits
    last = (1 << (7 - fraction_bits)) - 1
    per_step = -(-(1 << 16) // step)  # x * per_step >> 16 is x // step for all exponents

    def quantize(bits: Any, lowest: Any, limit: Any) -> Any:
        value = bits_of(load(bits))
        magnitude = float_of(value & u32(0x7FFFFFFF))
        magnitude = magnitude if magnitude < limit else limit
        exponent = i32(i32(bits_of(magnitude) >> u32(23)) - i32(127))
        above = i32(i32(exponent - lowest) + i32(step - 1))
        above = above if above > i32(0) else i32(0)
        index = i32(i32(above * i32(per_step)) >> i32(16))
        # The unit of the fraction is 2^-126 or more, so its inverse is a normal number.
        unit = i32(i32(lowest - i32(step)) + i32(index * i32(step)))
        inverse = float_of(u32(i32(127) - unit) << u32(23))
        # After adding 1.5 x 2^23, the lowest bits are the nearest integer.
        fraction = i32(bits_of(magnitude * inverse + f32(12582912.0)) & u32(0xFF))
        # Rounded up to the next binade, it is 2 units of the next shared exponent.
        carried = i32(2) if index < i32(last) else i32(full - 1)
        next_index = i32(index + i32(1)) if index < i32(last) else index
        index = next_index if fraction >= i32(full) else index
        fraction = carried if fraction >= i32(full) else fraction
        sign = i32((value >> u32(24)) & u32(0x80))
        return u8(i32(sign | i32(index << i32(fraction_bits))) | fraction)

    one = inlined(quantize)

    def encode(bits: Any, codes: Any, lowest: Any, limit: Any) -> None:
        blocks = codes.size // 64
        for block in range(blocks):
            some = bits[block * 64 : block * 64 + 64]
            coded = codes[block * 64 : block * 64 + 64]
            for i in range(64):
                coded[i] = one(some[i], lowest, limit)
        for i in range(blocks * 64, codes.size):
            codes[i] = one(bits[i], lowest, limit)

    bits_type = u32 if wide else u16
    return compiled(bits_type[::1], u8[::1], i32, f32)(encode)


@cache
def _decode_kernel(fraction_bits: int) -> Kernel:
    normalize = normalizer(fraction_bits)
    step = fraction_bits - 1
    in_fraction = (1 << fraction_bits) - 1
    in_index = 0x7F >> fraction_bits

    def value(code: Any, least: Any) -> Any:
        fraction = u16(code & u16(in_fraction))
        index = u16(u16(code >> u16(fraction_bits)) & u16(in_index))
        shared = u16(least + u16(index * u16(step << 7)))
        bits = u16(normalize(fraction) + shared)
        bits = bits if fraction > u16(0) else u16(0)
        return u16(bits | u16(u16(code & u16(0x80)) << u16(8)))

    one = inlined(value)

    def decode(codes: Any, out: Any, least: Any) -> None:
        blocks = codes.size // 64
        for block in range(blocks):
            some = out[block * 64 : block * 64 + 64]
            coded = codes[block * 64 : block * 64 + 64]
            for i in range(64):
                some[i] = one(u16(coded[i]), least)
        for i in range(blocks * 64, codes.size):
            out[i] = one(u16(codes[i]), least)

    return compiled(u8[::1], u16[::1], u16)(decode)
