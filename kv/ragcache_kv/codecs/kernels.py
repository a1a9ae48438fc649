"""How loops over KV are compiled: numba, at first use, without the GIL, nothing kept on disk.

A container's file system may be read-only and an image may run on another processor than the one
it was built on, so there is no cache folder. A kernel has one explicit signature and compiles in
about half a second; ``warm_up`` of the package does it before it matters.

What LLVM needs to use the widest registers, learnt by measuring: inner loops over slices (an index
that could be negative stops it), with a length known at compile time, in 16-bit integers where the
arithmetic allows, and two numbers in one 32-bit store where it takes floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

Kernel = Callable[..., None]

u8, u16, u32, i32, i64, f32 = (
    numba.uint8,
    numba.uint16,
    numba.uint32,
    numba.int32,
    numba.int64,
    numba.float32,
)
"""Casts within kernels, and with ``[::1]`` the types of their arrays."""


def compiled(*arguments: Any) -> Callable[[Callable[..., None]], Kernel]:
    """A loop compiled for arguments of these numba types."""
    signature = types.void(*arguments)

    def compile_loop(loop: Callable[..., None]) -> Kernel:
        kernel: Kernel = numba.njit(signature, nogil=True, error_model="numpy")(loop)
        return kernel

    return compile_loop


def inlined(function: Callable[..., Any]) -> Any:
    """A function for use within kernels."""
    return numba.njit(function, inline="always", error_model="numpy")


@intrinsic  # type: ignore[untyped-decorator]
def bits_of(_typing: Any, value: Any) -> Any:
    """Bit pattern of a float32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def float_of(_typing: Any, bits: Any) -> Any:
    """The float32 of a bit pattern."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


def _from_bfloat16(bits: Any) -> Any:
    return float_of(u32(bits) << u32(16))


def _from_float32(bits: Any) -> Any:
    return float_of(bits)


def loader(wide: bool) -> Any:
    """Reads one number of a kernel's input as float32: bfloat16's bits, or (wide) float32's."""
    return inlined(_from_float32 if wide else _from_bfloat16)


def normalizer(width: int) -> Any:
    """Turns a whole number of width bits into a bfloat16, less the bias of its exponent.

    Of 0 it makes what it makes of 1; the caller puts zero in its place.
    """

    def normalize(whole: Any) -> Any:
        bits = u16(0)
        for place in range(1, width):
            shifted = u16(u16(whole << u16(7 - place)) + u16((place - 1) << 7))
            bits = shifted if whole >= u16(1 << place) else bits
        return bits

    return inlined(normalize)


def _two_bfloat16(low: Any, high: Any) -> Any:
    upper = u32(bits_of(high) + u32(0x8000)) & u32(0xFFFF0000)
    return u32((u32(bits_of(low) + u32(0x8000)) >> u32(16)) | upper)


two_bfloat16 = inlined(_two_bfloat16)
"""Two float32 as bfloat16 in one uint32, low first; ties away from zero (``numbers.narrow``)."""
