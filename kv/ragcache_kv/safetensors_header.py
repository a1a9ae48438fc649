"""Reads the header of a safetensors file: a JSON object that describes each tensor.

Source: https://huggingface.co/docs/safetensors, section Format.
"""

from __future__ import annotations

from typing import BinaryIO, Final

LENGTH_BYTES: Final = 8
"""Size of the header's length, which the file begins with."""

_MAX_BYTES: Final = 100_000_000
"""The bound of the safetensors library."""


def read_header(file: BinaryIO) -> bytes:
    """Return the header of an open file. The file's position is then at the first tensor.

    Raises:
        ValueError: The file is not in the format safetensors.
    """
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    header = file.read(length) if length <= _MAX_BYTES else b""
    if not header or len(header) < length:
        raise ValueError(f"{file.name} is not a safetensors file")
    return header
