"""The interface of every codec, which encodes the keys or the values of one layer."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from typing_extensions import override

from ragcache_kv.codecs.numbers import Bits, Bytes, Number


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
