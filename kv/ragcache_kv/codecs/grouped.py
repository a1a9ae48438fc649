"""Codecs with a scale per group: INT8, FP8 E4M3, FP8 E5M2, INT4.

A group has up to ``group`` consecutive numbers of one head's vector. The last group of a vector may
be shorter. The scale is per group and not per part, since a part's largest number would cost every
other group its precision.

Encoded: the scales of all groups as bfloat16, then all codes. Two 4-bit codes are in a byte, low
half first. A vector of odd length ends with a half byte of 0.

INT8 and INT4: a number is code x scale. Codes are symmetric (-127..127, -7..7), so zero stays zero.
The scale is the bfloat16 nearest to the group's largest magnitude / 127 or 7.

FP8: the scale is a power of two that moves the group's largest magnitude to the format's highest
binades. Scaling is therefore exact, and only the format's own rounding remains. E4M3, which ends at
2^-9, also reaches as far below the largest number as it can.

A group with a NaN or an infinity decodes as NaN, so it never becomes a wrong number. Magnitudes
beyond ``Number.limit`` saturate.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from ragcache_kv.codecs.kernels import (
    Kernel,
    bits_of,
    compiled,
    f32,
    float_of,
    i32,
    i64,
    inlined,
    loader,
    normalizer,
    two_bfloat16,
    u8,
    u16,
    u32,
)
from ragcache_kv.codecs.numbers import (
    BFLOAT16,
    Bits,
    Bytes,
    Coder,
    Floats,
    Number,
    narrow,
    nearest_bfloat16,
    widen,
)

NAN = 0x7FFF
"""A bfloat16 NaN. A bitwise or with it turns any bfloat16 into a NaN."""
_BLOCK_NUMBERS = 1 << 16


@dataclass(frozen=True, slots=True)
class Grouped(Coder):
    """A codec with a scale per group.

    Attributes:
        group: Most numbers of a group.
        code_bits: 8 or 4.
    """

    group: int
    code_bits: int

    def num_bytes(self, rows: int, dim: int, _number: Number) -> int:
        """Return the encoded size, which is the same for every dtype."""
        return self._scale_bytes(rows, dim) + rows * self._row_bytes(dim)

    @override
    def encode(self, bits: Bits, dim: int, number: Number) -> Bytes:
        if number is not BFLOAT16:
            bits = widen(bits, number).view(np.uint32)
        rows = bits.size // dim
        largest = np.empty(rows * self._groups(dim), bits.dtype)
        _largest_kernel(bits.dtype == np.uint32, self.group)(bits, largest, dim)
        wide = widen(largest, BFLOAT16) if number is BFLOAT16 else largest.view(np.float32)
        scales = self._scales(wide, number)
        encoded = np.empty(self.num_bytes(rows, dim, number), np.uint8)
        start = self._scale_bytes(rows, dim)
        encoded[:start] = scales.view(np.uint8)
        kernel = self._encode_kernel(bits.dtype == np.uint32)
        kernel(bits, widen(scales, BFLOAT16), encoded[start:], dim, np.float32(number.limit))
        return encoded

    @override
    def decode(self, encoded: Bytes, out: Bits, dim: int, number: Number) -> None:
        rows = out.size // dim
        start = self._scale_bytes(rows, dim)
        scales = encoded[:start].copy().view(np.uint16)
        codes = encoded[start:]
        if number is BFLOAT16 and dim % 2 == 0:
            self._decode_kernel()(codes, scales, widen(scales, BFLOAT16), out, dim)
        else:
            self._decode_with_numpy(codes, widen(scales, BFLOAT16), out, dim, number)

    def _decode_with_numpy(
        self, codes: Bytes, scales: Floats, out: Bits, dim: int, number: Number
    ) -> None:
        """Decode the dtypes and shapes that the kernels do not handle, some rows at a time."""
        groups, row_bytes = self._groups(dim), self._row_bytes(dim)
        of_number = np.arange(dim) // self.group
        block = max(1, _BLOCK_NUMBERS // dim)
        for row in range(0, out.size // dim, block):
            some = codes[row * row_bytes : (row + block) * row_bytes].reshape(-1, row_bytes)
            of_group = scales[row * groups : (row + block) * groups].reshape(-1, groups)
            values = self._values(some, dim) * of_group[:, of_number]
            out[row * dim : (row + block) * dim] = narrow(values, number).reshape(-1)

    def _groups(self, dim: int) -> int:
        return -(-dim // self.group)

    def _row_bytes(self, dim: int) -> int:
        return dim if self.code_bits == 8 else -(-dim // 2)

    def _scale_bytes(self, rows: int, dim: int) -> int:
        return 2 * rows * self._groups(dim)

    @abstractmethod
    def _scales(self, largest: Floats, number: Number) -> NDArray[np.uint16]:
        """Return the scale of each group, as bfloat16, from its largest magnitude."""

    @abstractmethod
    def _values(self, codes: Bytes, dim: int) -> Floats:
        """Return the unscaled numbers, [rows, dim], of codes, [rows, row bytes]."""

    @abstractmethod
    def _encode_kernel(self, wide: bool) -> Kernel:
        """Return a kernel of (bits, scales, codes, dim, limit). If wide, bits are float32."""

    @abstractmethod
    def _decode_kernel(self) -> Kernel:
        """Return a kernel of (codes, scale bits, scales, out, dim) for bfloat16 and an even dim."""


@dataclass(frozen=True, slots=True)
class Int(Grouped):
    """INT8 and INT4."""

    @property
    def most(self) -> int:
        """Largest code."""
        return (1 << (self.code_bits - 1)) - 1

    def _scales(self, largest: Floats, number: Number) -> NDArray[np.uint16]:
        finite = np.isfinite(largest)
        bounded = np.where(finite, np.minimum(largest, np.float32(number.limit)), 1)
        scales = nearest_bfloat16(bounded.astype(np.float32) / np.float32(self.most))
        scales[scales == 0] = 1  # the smallest bfloat16, whose multiples are exact
        scales[~finite] = NAN
        return scales

    def _values(self, codes: Bytes, dim: int) -> Floats:
        if self.code_bits == 8:
            return codes.view(np.int8).astype(np.float32)
        halves = np.stack([codes << np.uint8(4), codes & np.uint8(0xF0)], axis=-1)
        signed = halves.view(np.int8) >> np.int8(4)
        return signed.reshape(codes.shape[0], -1)[:, :dim].astype(np.float32)

    def _encode_kernel(self, wide: bool) -> Kernel:
        return _encode_int(wide, self.group, self.code_bits)

    def _decode_kernel(self) -> Kernel:
        return _decode_int8(self.group) if self.code_bits == 8 else _decode_int4(self.group)


@dataclass(frozen=True, slots=True)
class Fp8(Grouped):
    """FP8 without infinities and NaN. The highest finite code is 1.75 x 2^top in both formats.

    Attributes:
        fraction_bits: Bits of the fraction.
        bias: Bias of the exponent.
        top: Exponent of two of the highest binade.
    """

    fraction_bits: int
    bias: int
    top: int

    @property
    def most(self) -> int:
        """Highest finite code."""
        return ((self.top + self.bias) << self.fraction_bits) | (3 << (self.fraction_bits - 2))

    def _scales(self, largest: Floats, number: Number) -> NDArray[np.uint16]:
        finite = np.isfinite(largest)
        half, exponent = np.frexp(np.where(finite, np.minimum(largest, number.limit), 1))
        power = exponent - 1 - self.top + (half > 0.875)
        least = number.least - (1 - self.bias - self.fraction_bits)
        scales: NDArray[np.uint16] = ((np.maximum(power, least) + 127) << 7).astype(np.uint16)
        scales[~finite] = NAN
        return scales

    def _values(self, codes: Bytes, dim: int) -> Floats:
        return self.table()[codes]

    def table(self) -> Floats:
        """Return the number of each of the 256 codes. Those of infinity and NaN are unused."""
        code = np.arange(256)
        exponent = (code & 0x7F) >> self.fraction_bits
        fraction = (code & ((1 << self.fraction_bits) - 1)) / (1 << self.fraction_bits)
        magnitude = np.ldexp(
            np.where(exponent > 0, 1 + fraction, 2 * fraction), exponent - self.bias
        )
        return np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)

    def _encode_kernel(self, wide: bool) -> Kernel:
        return _encode_fp8(wide, self.group, self.fraction_bits, self.bias, self.most)

    def _decode_kernel(self) -> Kernel:
        return _decode_fp8(self.group, self.fraction_bits, self.bias)


INT8 = Int(64, 8)
INT4 = Int(32, 4)
E4M3 = Fp8(64, 8, 3, 7, 8)
E5M2 = Fp8(64, 8, 2, 15, 15)


@cache
def _largest_kernel(wide: bool, group: int) -> Kernel:
    bits_type, magnitude = (u32, 0x7FFFFFFF) if wide else (u16, 0x7FFF)

    def largest(bits: Any, largest_of: Any, dim: Any) -> None:
        at = 0
        of_group = 0
        for _ in range(bits.size // dim):
            left = dim
            while left > 0:
                most = bits_type(0)
                if left >= group:
                    some = bits[at : at + group]
                    for i in range(group):
                        most = max(most, bits_type(some[i] & bits_type(magnitude)))
                else:
                    for i in range(at, at + left):
                        most = max(most, bits_type(bits[i] & bits_type(magnitude)))
                largest_of[of_group] = most
                of_group += 1
                at += group
                left -= group
            at += left  # after a shorter group, left is negative

    return compiled(bits_type[::1], bits_type[::1], i64)(largest)


def _encode_loop(bits_type: Any, one: Any, group: int) -> Kernel:
    """Return the loop of 8-bit encoders over vectors and groups. one encodes a number."""

    def encode(bits: Any, scales: Any, codes: Any, dim: Any, limit: Any) -> None:
        at = 0
        of_group = 0
        for _ in range(bits.size // dim):
            left = dim
            while left >= group:
                some = bits[at : at + group]
                coded = codes[at : at + group]
                scale = scales[of_group]
                for i in range(group):
                    coded[i] = one(some[i], scale, limit)
                of_group += 1
                at += group
                left -= group
            if left > 0:
                scale = scales[of_group]
                for i in range(at, at + left):
                    codes[i] = one(bits[i], scale, limit)
                of_group += 1
                at += left

    return compiled(bits_type[::1], f32[::1], u8[::1], i64, f32)(encode)


@cache
def _encode_int(wide: bool, group: int, code_bits: int) -> Kernel:
    load = loader(wide)
    most = (1 << (code_bits - 1)) - 1
    bits_type = u32 if wide else u16

    def quantize(bits: Any, scale: Any, _limit: Any) -> Any:
        ratio = load(bits) / scale
        ratio = ratio if ratio < f32(most) else f32(most)
        ratio = ratio if ratio > f32(-most) else f32(-most)
        # After adding 1.5 x 2^23, the lowest bits are the nearest integer.
        return u8(bits_of(ratio + f32(12582912.0)) & u32(0xFF))

    one = inlined(quantize)
    if code_bits == 8:
        return _encode_loop(bits_type, one, group)

    def encode(bits: Any, scales: Any, codes: Any, dim: Any, limit: Any) -> None:
        at = 0
        code = 0
        of_group = 0
        for _ in range(bits.size // dim):
            left = dim
            while left > 0:
                count = min(left, group)
                scale = scales[of_group]
                some = bits[at : at + count]
                coded = codes[code : code + (count + 1) // 2]
                for i in range(count // 2):
                    low = one(some[2 * i], scale, limit) & u8(15)
                    coded[i] = low | u8(one(some[2 * i + 1], scale, limit) << u8(4))
                if count % 2 == 1:
                    coded[count // 2] = one(some[count - 1], scale, limit) & u8(15)
                of_group += 1
                at += count
                code += (count + 1) // 2
                left -= count

    return compiled(bits_type[::1], f32[::1], u8[::1], i64, f32)(encode)


@cache
def _encode_fp8(wide: bool, group: int, fraction_bits: int, bias: int, most: int) -> Kernel:
    load = loader(wide)
    bits_type = u32 if wide else u16
    dropped = 23 - fraction_bits
    rebias = (127 - bias) << fraction_bits
    least_normal = 2.0 ** (1 - bias)
    # After adding it, the lowest bits are the multiple of the smallest number.
    whole = 1.5 * 2.0 ** (23 + 1 - bias - fraction_bits)

    def quantize(bits: Any, scale: Any, limit: Any) -> Any:
        value = bits_of(load(bits))
        magnitude = float_of(value & u32(0x7FFFFFFF))
        magnitude = (magnitude if magnitude < limit else limit) / scale
        pattern = bits_of(magnitude)
        odd = (pattern >> u32(dropped)) & u32(1)
        rounded = u32(pattern + u32((1 << (dropped - 1)) - 1) + odd) >> u32(dropped)
        normal = u32(rounded - u32(rebias))
        small = u32(bits_of(magnitude + f32(whole)) & u32(0xFF))
        code = normal if magnitude >= f32(least_normal) else small
        code = code if code < u32(most) else u32(most)
        return u8(code | ((value >> u32(24)) & u32(0x80)))

    return _encode_loop(bits_type, inlined(quantize), group)


def _decode_two(one: Any, group: int, codes_of: Any) -> Kernel:
    """Return the loop of decoders that store two numbers at once. codes_of views codes as pairs."""

    half = group // 2

    def decode(codes: Any, _bits: Any, scales: Any, out: Any, dim: Any) -> None:
        pairs = codes_of(codes)
        stores = out.view(np.uint32)
        at = 0
        of_group = 0
        for _ in range(out.size // dim):
            left = dim // 2
            while left >= half:
                scale = scales[of_group]
                coded = pairs[at : at + half]
                some = stores[at : at + half]
                for i in range(half):
                    some[i] = one(coded[i], scale)
                of_group += 1
                at += half
                left -= half
            if left > 0:
                scale = scales[of_group]
                for i in range(at, at + left):
                    stores[i] = one(pairs[i], scale)
                of_group += 1
                at += left  # after a shorter group, left is negative

    return compiled(u8[::1], u16[::1], f32[::1], u16[::1], i64)(decode)


@cache
def _decode_int8(group: int) -> Kernel:
    return _decode_two(inlined(_two_int8), group, inlined(lambda codes: codes.view(np.uint16)))


@cache
def _decode_int4(group: int) -> Kernel:
    return _decode_two(inlined(_two_int4), group, inlined(lambda codes: codes))


def _two_int8(pair: Any, scale: Any) -> Any:
    codes = i32(pair)
    low = f32(i32(codes << i32(24)) >> i32(24)) * scale
    high = f32(i32(codes << i32(16)) >> i32(24)) * scale
    return two_bfloat16(low, high)


def _two_int4(pair: Any, scale: Any) -> Any:
    codes = i32(pair)
    low = f32(i32(codes << i32(28)) >> i32(28)) * scale
    high = f32(i32(codes << i32(24)) >> i32(28)) * scale
    return two_bfloat16(low, high)


@cache
def _decode_fp8(group: int, fraction_bits: int, bias: int) -> Kernel:
    one_in_fraction = 1 << fraction_bits
    normalize = normalizer(fraction_bits)
    scale_rebias = bias << 7
    small_rebias = (fraction_bits - 1) << 7
    not_a_number = NAN

    def value(code: Any, base: Any, nan_bits: Any) -> Any:
        magnitude = u16(code & u16(0x7F))
        normal = u16(u16(magnitude << u16(7 - fraction_bits)) + base)
        small = u16(normalize(magnitude) + u16(base - u16(small_rebias)))
        bits = normal if magnitude >= u16(one_in_fraction) else small
        bits = bits if magnitude > u16(0) else u16(0)
        return u16(bits | nan_bits | u16(u16(code & u16(0x80)) << u16(8)))

    one = inlined(value)

    def decode(codes: Any, bits: Any, _scales: Any, out: Any, dim: Any) -> None:
        at = 0
        of_group = 0
        for _ in range(out.size // dim):
            left = dim
            while left > 0:
                base = u16(bits[of_group] - u16(scale_rebias))
                nan_bits = u16(not_a_number) if bits[of_group] == u16(not_a_number) else u16(0)
                if left >= group:
                    coded = codes[at : at + group]
                    some = out[at : at + group]
                    for i in range(group):
                        some[i] = one(u16(coded[i]), base, nan_bits)
                else:
                    for i in range(at, at + left):
                        out[i] = one(u16(codes[i]), base, nan_bits)
                of_group += 1
                at += group
                left -= group
            at += left  # after a shorter group, left is negative

    return compiled(u8[::1], u16[::1], f32[::1], u16[::1], i64)(decode)
