"""Reads models in llama.cpp's GGUF format.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Only what a bundled model uses
is read: version 3 and the tensor types F32, F16, Q8_0 and Q4_1.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ragcache_core.errors import InvalidInput

_MAGIC: Final = b"GGUF"
_VERSION: Final = 3
_ALIGNMENT: Final = 32
_BLOCK: Final = 32
"""Numbers in one quantized block."""

_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"},
    **{10: "Q", 11: "q", 12: "d"},
}
"""``struct`` format of each scalar type of a field."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor. ``shape`` is in the order of torch, and ``data`` still quantized."""

    name: str
    shape: tuple[int, ...]
    kind: int
    data: bytes

    def dequantized(self) -> npt.NDArray[np.float32]:
        """Return its numbers as float32 of its shape."""
        return _TENSOR_TYPES[self.kind].decode(self.data).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The fields of a model file, and its tensors by name."""

    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]


@dataclass(frozen=True, slots=True)
class _TensorType:
    """How one tensor type stores ``numbers`` numbers in ``num_bytes`` bytes."""

    numbers: int
    num_bytes: int
    decode: Callable[[bytes], npt.NDArray[np.float32]]


def read_gguf(path: Path) -> GgufFile:
    """Read a model file.

    Raises:
        InvalidInput: It is not a GGUF file of version 3, is truncated, or has a tensor type that is
            not supported.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            return _Reader(data).read()
    except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
        raise InvalidInput(
            str(path), f"is not a readable GGUF file ({error!r})", "fetch the model again"
        ) from error


class _Reader:
    """Reads values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self) -> GgufFile:
        magic, version = self._take(4), self._number("I")
        if magic != _MAGIC or version != _VERSION:
            raise ValueError(f"magic {magic!r}, version {version}")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        fields = {self._string(): self._value(self._number("I")) for _ in range(num_fields)}
        described = [self._description() for _ in range(num_tensors)]
        start = _aligned(self._at)
        tensors = {}
        for name, shape, kind, offset in described:
            layout = _TENSOR_TYPES[kind]
            self._at = start + offset
            data = self._take(prod(shape) // layout.numbers * layout.num_bytes)
            tensors[name] = GgufTensor(name, shape, kind, data)
        return GgufFile(fields, tensors)

    def _description(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        # GGUF writes the fastest dimension first.
        shape = tuple(reversed([self._number("Q") for _ in range(self._number("I"))]))
        return name, shape, self._number("I"), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, length = self._number("I"), self._number("Q")
            return [self._value(inner) for _ in range(length)]
        return self._number(_SCALARS[kind])

    def _string(self) -> str:
        return self._take(self._number("Q")).decode()

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _take(self, num_bytes: int) -> bytes:
        taken = self._data[self._at : self._at + num_bytes]
        if len(taken) != num_bytes:
            raise ValueError("truncated")
        self._at += num_bytes
        return taken


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _float32(data: bytes) -> npt.NDArray[np.float32]:
    return np.frombuffer(data, "<f4")


def _float16(data: bytes) -> npt.NDArray[np.float32]:
    return np.frombuffer(data, "<f2").astype(np.float32)


def _q8_0(data: bytes) -> npt.NDArray[np.float32]:
    """Decode blocks of a scale and 32 signed bytes."""
    blocks = np.frombuffer(data, np.dtype([("scale", "<f2", (1,)), ("values", "i1", _BLOCK)]))
    return _floats(blocks["values"]) * _floats(blocks["scale"])


def _q4_1(data: bytes) -> npt.NDArray[np.float32]:
    """Decode blocks of a scale, a minimum and 32 halves of a byte: first the low, then the high."""
    layout = [("scale", "<f2", (1,)), ("minimum", "<f2", (1,)), ("values", "u1", _BLOCK // 2)]
    blocks = np.frombuffer(data, np.dtype(layout))
    values = np.concatenate([blocks["values"] & 15, blocks["values"] >> 4], axis=1)
    return _floats(values) * _floats(blocks["scale"]) + _floats(blocks["minimum"])


def _floats(column: npt.ArrayLike) -> npt.NDArray[np.float32]:
    return np.asarray(column, np.float32)


_TENSOR_TYPES: Final = {
    0: _TensorType(1, 4, _float32),
    1: _TensorType(1, 2, _float16),
    3: _TensorType(_BLOCK, 20, _q4_1),
    8: _TensorType(_BLOCK, 34, _q8_0),
}
"""Tensor types by their number in the format."""
