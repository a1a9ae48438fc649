"""What all codecs share: the floating-point numbers of KV as bit patterns, and the interface.

numpy has no bfloat16, so numbers are unsigned integers of the same width. A codec encodes the keys
or the values of one layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

Bytes = NDArray[np.uint8]
Bits = NDArray[Any]
"""Bit patterns of KV numbers: uint16 or uint32."""
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Number:
    """One dtype of KV.

    Attributes:
        name: Name of the dtype.
        num_bytes: Size of a number.
        least: Exponent of two of the smallest non-zero number that lossy codecs decode to. Its
            multiples are exact in this dtype. Denormals of bfloat16 are not needed.
        limit: Magnitude to which lossy codecs saturate. Every codec rounds it without overflow.
    """

    name: str
    num_bytes: int
    least: int
    limit: float

    @property
    def bits(self) -> np.dtype[Any]:
        """The unsigned integer type of the same width."""
        return np.dtype(f"<u{self.num_bytes}")


BFLOAT16 = Number("bfloat16", 2, -126, 1.75 * 2.0**127)
FLOAT16 = Number("float16", 2, -24, 1.75 * 2.0**15)
FLOAT32 = Number("float32", 4, -126, 1.75 * 2.0**127)
NUMBERS = {number.name: number for number in (BFLOAT16, FLOAT16, FLOAT32)}


def widen(bits: Bits, number: Number) -> Floats:
    """Convert numbers to float32, exactly."""
    if number is BFLOAT16:
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float16 if number is FLOAT16 else np.float32).astype(np.float32)


def narrow(values: Floats, number: Number) -> Bits:
    """Round to the nearest number. For bfloat16, ties round away from zero as in the kernels."""
    if number is BFLOAT16:
        patterns = np.ascontiguousarray(values).view(np.uint32)
        return ((patterns + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    if number is FLOAT16:
        return values.astype(np.float16).view(np.uint16)
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def nearest_bfloat16(values: Floats) -> NDArray[np.uint16]:
    """Return the bit patterns of the nearest bfloat16, ties to even. values must have no NaN."""
    patterns = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = (patterns >> np.uint32(16)) & np.uint32(1)
    return ((patterns + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


class Coder(ABC):
    """Encodes and decodes C-contiguous vectors of dim numbers."""

    __slots__ = ()

    @abstractmethod
    def num_bytes(self, rows: int, dim: int, number: Number) -> int:
        """Return the encoded size of rows vectors. Raises ValueError if the size varies."""

    @abstractmethod
    def encode(self, bits: Bits, dim: int, number: Number) -> Bytes:
        """Encode bits, [rows * dim]."""

    @abstractmethod
    def decode(self, encoded: Bytes, out: Bits, dim: int, number: Number) -> None:
        """Decode ``encoded_bytes`` bytes into out, [rows * dim]. Raises ValueError."""

    def encoded_bytes(self, _encoded: Bytes, rows: int, dim: int, number: Number) -> int:
        """Return the size of the encoded vectors at the start of encoded.

        Raises:
            ValueError: ``encode`` cannot have written these bytes.
        """
        return self.num_bytes(rows, dim, number)


class Native(Coder):
    """The codec without encoding."""

    @override
    def num_bytes(self, rows: int, dim: int, number: Number) -> int:
        return rows * dim * number.num_bytes

    @override
    def encode(self, bits: Bits, _dim: int, _number: Number) -> Bytes:
        return bits.view(np.uint8)

    @override
    def decode(self, encoded: Bytes, out: Bits, _dim: int, _number: Number) -> None:
        out.view(np.uint8)[:] = encoded
