"""Select the bytes of a model's weights that are hashed to tell two models apart.

Small models are hashed whole. Of larger ones these bytes are hashed:

- the header of each file, which has the name, type and shape of every tensor,
- small tensors whole, such as norms and biases,
- the token embedding whole, because training of added tokens changes only some of its rows,
- of every other tensor, slices at positions that look random and depend on its name only.

A merged LoRA or further training changes most numbers of a matrix, and a sparse update a small
share of them at random. The slices contain some of these. A change of a few rows of an inner matrix
of a large model may be missed. Any new field of config.json then tells the models apart.

Source: https://huggingface.co/docs/safetensors, section Format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WHOLE_BYTES = 1 << 30
"""Weights up to this size are hashed whole. It takes about half a second on two cores."""

SLICE_BYTES = 4096
"""Size of a slice: a disk and the page cache read no less."""

MAX_SLICES = 64
"""Slices of one tensor, at most."""

MIN_SLICES = 4
"""Slices of one tensor, at least."""

ALL_SLICES = 1 << 16
"""Slices of all tensors together, as far as each tensor gets MIN_SLICES. They are 256 MiB."""

PIECE_BYTES = 1 << 20
"""Size of the pieces of what is hashed whole. Each thread keeps one in memory."""

_OUTPUT_HEAD = "lm_head."
"""Name of the output layer. It has a row for each token, and no KV depends on it."""

_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a weights file.

    Attributes:
        rows: Size of its first dimension; 1 if it has no dimension.
        span: Positions of its bytes in the file.
    """

    name: str
    rows: int
    span: range


def read_tensors(header: bytes, data: range) -> tuple[StoredTensor, ...]:
    """Return the tensors of a safetensors file, in the order of their bytes.

    Args:
        header: The JSON object at the beginning of the file.
        data: Positions in the file of what follows the header.

    Raises:
        ValueError: It is not a header, or it names bytes that the file lacks.
    """
    try:
        tensors = [
            _read_tensor(name, tensor, data.start)
            for name, tensor in json.loads(header).items()
            if name != _METADATA
        ]
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"it has no safetensors header: {error!r}") from error
    for one in tensors:
        if not data.start <= one.span.start <= one.span.stop <= data.stop:
            raise ValueError(f"it lacks bytes of the tensor {one.name}")
    return tuple(sorted(tensors, key=lambda one: (one.span.start, one.span.stop, one.name)))


def hashed_ranges(
    files: Sequence[Sequence[StoredTensor]], vocabulary: int
) -> list[list[tuple[range, ...]]]:
    """Return the bytes to hash of each file, in groups. The bytes of a group are hashed together.

    Args:
        files: The tensors of each file of a model.
        vocabulary: Number of tokens that the model knows; 0: unknown. A tensor with as many rows is
            the token embedding.
    """
    num_tensors = sum(map(len, files))
    slices = max(MIN_SLICES, min(MAX_SLICES, ALL_SLICES // max(1, num_tensors)))
    if sum(len(one.span) for tensors in files for one in tensors) <= WHOLE_BYTES:
        return [[group for one in tensors for group in _pieces(one.span)] for tensors in files]
    return [
        [group for one in tensors for group in _sample(one, vocabulary, slices)]
        for tensors in files
    ]


def _read_tensor(name: str, tensor: Mapping[str, Any], data_start: int) -> StoredTensor:
    shape, (start, end) = tensor["shape"], tensor["data_offsets"]
    rows = int(shape[0]) if shape else 1
    return StoredTensor(name, rows, range(data_start + int(start), data_start + int(end)))


def _sample(tensor: StoredTensor, vocabulary: int, slices: int) -> Iterator[tuple[range, ...]]:
    is_embedding = 0 < vocabulary <= tensor.rows and not tensor.name.startswith(_OUTPUT_HEAD)
    if is_embedding or len(tensor.span) <= slices * SLICE_BYTES:
        yield from _pieces(tensor.span)
    else:
        yield tuple(_slice(tensor, index, slices) for index in range(slices))


def _pieces(span: range) -> Iterator[tuple[range, ...]]:
    for start in range(span.start, span.stop, PIECE_BYTES):
        yield (range(start, min(start + PIECE_BYTES, span.stop)),)


def _slice(tensor: StoredTensor, index: int, slices: int) -> range:
    """Return one slice in each of as many equal parts of a tensor.

    Its position in the part differs from part to part. Otherwise all slices could lie in the same
    columns of a matrix.
    """
    size = len(tensor.span)
    first, end = (tensor.span.start + size * part // slices for part in (index, index + 1))
    seed = hashlib.blake2b(f"{index}\0{tensor.name}".encode(), digest_size=8).digest()
    start = first + int.from_bytes(seed, "little") % (end - first - SLICE_BYTES + 1)
    return range(start, start + SLICE_BYTES)
