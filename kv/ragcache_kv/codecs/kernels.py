"""Compiles loops over KV with numba, at first use. They release the GIL.

There is no cache folder: a container's file system may be read-only, and an image may run on
another processor than the one that built it. A kernel has one explicit signature and compiles in
about half a second. ``warm_up`` of the package compiles before the first request.

Measurements show when LLVM uses the widest registers. The inner loops run over slices, since an
index that could be negative stops LLVM. Their length is known at compile time. They use 16-bit
integers if the arithmetic allows it. With floats, they store two numbers as one 32-bit integer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

Kernel = Callable[..., Any]

u8, u16, u32, i32, i64, f32 = (
    numba.uint8,
    numba.uint16,
    numba.uint32,
    numba.int32,
    numba.int64,
    numba.float32,
)
"""Casts in kernels; with ``[::1]`` the types of their arrays."""


def compiled(*arguments: Any, returns: Any = types.void) -> Callable[[Kernel], Kernel]:
    """Return a decorator that compiles a loop for arguments of these numba types."""
    signature = returns(*arguments)

    def compile_loop(loop: Kernel) -> Kernel:
        kernel: Kernel = numba.njit(signature, nogil=True, error_model="numpy")(loop)
        return kernel

    return compile_loop


def inlined(function: Callable[..., Any]) -> Any:
    """Return a function that kernels inline."""
    return numba.njit(function, inline="always", error_model="numpy")


@intrinsic  # type: ignore[untyped-decorator]
def bits_of(_typing: Any, value: Any) -> Any:
    """Return the bit pattern of a float32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def float_of(_typing: Any, bits: Any) -> Any:
    """Return the float32 of a bit pattern."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


def _from_bfloat16(bits: Any) -> Any:
    return float_of(u32(bits) << u32(16))


def _from_float32(bits: Any) -> Any:
    return float_of(bits)


def loader(wide: bool) -> Any:
    """Return a function that reads the bits of a bfloat16, or if wide of a float32, as float32."""
    return inlined(_from_float32 if wide else _from_bfloat16)


def normalizer(width: int) -> Any:
    """Return a function from an integer of width bits to a bfloat16 without exponent bias.

    Its result for 0 equals that for 1, so the caller replaces it by zero.
    """

    def normalize(whole: Any) -> Any:
        bits = u16(0)
        for shift in range(1, width):
            shifted = u16(u16(whole << u16(7 - shift)) + u16((shift - 1) << 7))
            bits = shifted if whole >= u16(1 << shift) else bits
        return bits

    return inlined(normalize)


def _two_bfloat16(low: Any, high: Any) -> Any:
    upper = u32(bits_of(high) + u32(0x8000)) & u32(0xFFFF0000)
    return u32((u32(bits_of(low) + u32(0x8000)) >> u32(16)) | upper)


two_bfloat16 = inlined(_two_bfloat16)
"""Rounds two float32 to bfloat16 in one uint32, low first; ties as in ``numbers.narrow``."""
