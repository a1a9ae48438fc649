"""Rotation on the CPU: one compiled loop for each kind of key.

A kernel knows at compile time its dtype, its pairing, its sizes, and whether it rotates in place.
If keys and out might overlap in part, LLVM would not vectorize. Neighbours are loaded as one
integer of twice their width, since LLVM would load every second number one by one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import uint64 as u64
from numba.core import types
from numba.extending import intrinsic

from ragcache_kv.codecs.kernels import (
    Kernel,
    bits_of,
    compiled,
    f32,
    i64,
    inlined,
    loader,
    u16,
    u32,
)
from ragcache_kv.codecs.numbers import BFLOAT16, FLOAT16, NUMBERS, Bits, Floats, Number
from ragcache_kv.rotation.rope import Pairing, Rope


def rotate(keys: Bits, out: Bits, table: Floats, rope: Rope, number: Number) -> None:
    """Rotate keys into out. It releases the GIL.

    Args:
        keys: [rows, head_dim].
        out: keys itself, or an array of its shape that shares no memory with it.
        table: [2, rotary_dim / 2], cosines and sines.
        rope: The model's rotation.
        number: The dtype of keys.
    """
    width = number.num_bytes * (2 if rope.pairing is Pairing.NEIGHBOURS else 1)
    if any(array.__array_interface__["data"][0] % width for array in (keys, out)):
        # The kernel loads neighbours as one integer, which needs its alignment.
        result = keys.copy()
        rotate(result, result, table, rope, number)
        np.copyto(out, result)
        return
    in_place = out is keys
    kernel = _kernel(number.name, rope.pairing, rope.rotary_dim // 2, rope.head_dim, in_place)
    words = [
        array.reshape(-1).view(f"<u{width}") for array in ([keys] if in_place else [keys, out])
    ]
    kernel(*words, *table)


@cache
def _kernel(name: str, pairing: Pairing, half: int, dim: int, in_place: bool) -> Kernel:
    """Return a kernel of (keys, cosines, sines) in place, else of (keys, out, cosines, sines)."""
    number = NUMBERS[name]
    if pairing is Pairing.NEIGHBOURS:
        return _neighbours_kernel(number, half, dim // 2, in_place)
    return _halves_kernel(number, half, dim, in_place)


def _halves_kernel(number: Number, half: int, dim: int, in_place: bool) -> Kernel:
    load, store = number_loader(number), number_storer(number)
    bits = (u32 if number.num_bytes == 4 else u16)[::1]

    @inlined
    def rotate_row(
        left: Any, right: Any, new_left: Any, new_right: Any, cosines: Any, sines: Any
    ) -> None:
        for j in range(half):
            x, y = load(left[j]), load(right[j])
            new_left[j] = store(x * cosines[j] - y * sines[j])
            new_right[j] = store(y * cosines[j] + x * sines[j])

    if in_place:

        @compiled(bits, f32[::1], f32[::1])
        def rotate_in_place(keys: Any, cosines: Any, sines: Any) -> None:
            for row in range(keys.size // i64(dim)):
                start = row * i64(dim)
                left = keys[start : start + half]
                right = keys[start + half : start + 2 * half]
                rotate_row(left, right, left, right, cosines, sines)

        return rotate_in_place

    @compiled(bits, bits, f32[::1], f32[::1])
    def rotate_into(keys: Any, out: Any, cosines: Any, sines: Any) -> None:
        for row in range(keys.size // i64(dim)):
            start = row * i64(dim)
            left, right = keys[start : start + half], keys[start + half : start + 2 * half]
            new_left, new_right = out[start : start + half], out[start + half : start + 2 * half]
            rotate_row(left, right, new_left, new_right, cosines, sines)
            if 2 * half < dim:
                out[start + 2 * half : start + dim] = keys[start + 2 * half : start + dim]

    return rotate_into


def _neighbours_kernel(number: Number, half: int, row_pairs: int, in_place: bool) -> Kernel:
    load, store = number_loader(number), number_storer(number)
    bits, pair = (u32, u64) if number.num_bytes == 4 else (u16, u32)
    width = 8 * number.num_bytes

    @inlined
    def rotate_row(pairs: Any, new_pairs: Any, cosines: Any, sines: Any) -> None:
        for j in range(half):
            x, y = load(bits(pairs[j])), load(bits(pairs[j] >> pair(width)))
            low = pair(store(x * cosines[j] - y * sines[j]))
            high = pair(store(y * cosines[j] + x * sines[j]))
            new_pairs[j] = pair(low | pair(high << pair(width)))

    if in_place:

        @compiled(pair[::1], f32[::1], f32[::1])
        def rotate_in_place(keys: Any, cosines: Any, sines: Any) -> None:
            for row in range(keys.size // i64(row_pairs)):
                start = row * i64(row_pairs)
                pairs = keys[start : start + half]
                rotate_row(pairs, pairs, cosines, sines)

        return rotate_in_place

    @compiled(pair[::1], pair[::1], f32[::1], f32[::1])
    def rotate_into(keys: Any, out: Any, cosines: Any, sines: Any) -> None:
        for row in range(keys.size // i64(row_pairs)):
            start = row * i64(row_pairs)
            end = start + row_pairs
            rotate_row(keys[start : start + half], out[start : start + half], cosines, sines)
            if half < row_pairs:
                out[start + half : end] = keys[start + half : end]

    return rotate_into


def number_loader(number: Number) -> Any:
    """Return a function for kernels that converts a bit pattern to a float32."""
    return inlined(_from_float16) if number is FLOAT16 else loader(number.num_bytes == 4)


def number_storer(number: Number) -> Any:
    """Return a function for kernels that rounds a float32 to a bit pattern, ties to even."""
    if number is BFLOAT16:
        return inlined(_to_bfloat16)
    return inlined(_to_float16 if number is FLOAT16 else _to_float32)


def _to_bfloat16(value: Any) -> Any:
    """Round ties to even, as engines do. A NaN of bfloat16 stays a NaN."""
    bits = bits_of(value)
    return u16(u32(bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16))


def _to_float32(value: Any) -> Any:
    return bits_of(value)


def _from_float16(bits: Any) -> Any:
    return _widened(bits)


def _to_float16(value: Any) -> Any:
    return _narrowed(value)


@intrinsic  # type: ignore[untyped-decorator]
def _widened(_typing: Any, bits: Any) -> Any:
    """Convert the bit pattern of a float16 to a float32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic  # type: ignore[untyped-decorator]
def _narrowed(_typing: Any, value: Any) -> Any:
    """Return the bit pattern of the nearest float16, ties to even."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate
