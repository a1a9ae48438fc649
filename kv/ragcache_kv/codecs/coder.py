"""The interface of every codec: how the keys or the values of one layer are held."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from ragcache_kv.codecs.numbers import Bits, Bytes, Number


class Coder(ABC):
    """Codes numbers that are vectors of dim; all of them C-contiguous, one after another."""

    __slots__ = ()

    @abstractmethod
    def num_bytes(self, rows: int, dim: int, number: Number) -> int:
        """Encoded size of rows vectors. Raises ValueError if it depends on the numbers."""

    @abstractmethod
    def encode(self, bits: Bits, dim: int, number: Number) -> Bytes:
        """Encode bits, [rows * dim]."""

    @abstractmethod
    def decode(self, encoded: Bytes, out: Bits, dim: int, number: Number) -> None:
        """Decode into out, [rows * dim]. encoded has ``held_bytes`` bytes. Raises ValueError."""

    def held_bytes(self, _encoded: Bytes, rows: int, dim: int, number: Number) -> int:
        """Size of what encoded starts with. Raises ValueError if encode never writes such."""
        return self.num_bytes(rows, dim, number)


class Native(Coder):
    """Numbers as they are."""

    def num_bytes(self, rows: int, dim: int, number: Number) -> int:
        """Their own size."""
        return rows * dim * number.num_bytes

    def encode(self, bits: Bits, _dim: int, _number: Number) -> Bytes:
        """Their bytes."""
        return bits.view(np.uint8)

    def decode(self, encoded: Bytes, out: Bits, _dim: int, _number: Number) -> None:
        """Copy them."""
        out.view(np.uint8)[:] = encoded
