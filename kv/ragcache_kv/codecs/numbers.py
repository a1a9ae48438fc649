"""The floating-point numbers that KV is made of, as bit patterns in numpy.

numpy has no bfloat16, so numbers travel as unsigned integers of their own width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Bits = NDArray[Any]
"""Bit patterns of KV numbers: uint16 or uint32."""
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Number:
    """One dtype of KV.

    least: exponent of two of the smallest number that lossy codecs give back beside zero; all its
    multiples are exact in this dtype (bfloat16's denormals are left out: no decoder needs them).
    limit: magnitude to which lossy codecs saturate; every codec can round it without overflow.
    """

    name: str
    num_bytes: int
    least: int
    limit: float

    @property
    def bits(self) -> np.dtype[Any]:
        """The unsigned integer of its width."""
        return np.dtype(f"<u{self.num_bytes}")


BFLOAT16 = Number("bfloat16", 2, -126, 1.75 * 2.0**127)
FLOAT16 = Number("float16", 2, -24, 1.75 * 2.0**15)
FLOAT32 = Number("float32", 4, -126, 1.75 * 2.0**127)
NUMBERS = {number.name: number for number in (BFLOAT16, FLOAT16, FLOAT32)}


def widen(bits: Bits, number: Number) -> Floats:
    """The numbers as float32, exactly."""
    if number is BFLOAT16:
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float16 if number is FLOAT16 else np.float32).astype(np.float32)


def narrow(values: Floats, number: Number) -> Bits:
    """To the nearest number; bfloat16 rounds ties away from zero, as the kernels do."""
    if number is BFLOAT16:
        patterns = np.ascontiguousarray(values).view(np.uint32)
        return ((patterns + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    if number is FLOAT16:
        return values.astype(np.float16).view(np.uint16)
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def nearest_bfloat16(values: Floats) -> NDArray[np.uint16]:
    """Bit patterns of the nearest bfloat16, ties to even. Not for NaN."""
    patterns = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = (patterns >> np.uint32(16)) & np.uint32(1)
    return ((patterns + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
