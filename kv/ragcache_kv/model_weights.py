"""The size of a model's weights in memory, from the headers of its safetensors files."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

log = logging.getLogger("ragcache.model")

_CONVERTED: Final = ("F64", "F32", "F16", "BF16")
"""Types of safetensors that loading converts."""
_LOADED_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one number, by the type that it is converted to."""
_INDEX: Final = "model.safetensors.index.json"
_MAX_HEADER_BYTES: Final = 100_000_000
"""The bound of the safetensors library."""


def read_weights_bytes(source: str, dtype: str) -> int | None:
    """Return the size of a model's weights after loading, in bytes. None if it is unknown.

    It reads headers and no weights, also of a model of the Hugging Face hub.

    Args:
        source: A folder, or a Hugging Face name.
        dtype: The type that weights are converted to; ``auto`` keeps the stored type.
    """
    folder = Path(source)
    try:
        sizes = _folder_sizes(folder, dtype) if folder.is_dir() else _hub_sizes(source, dtype)
        return sum(sizes) or None
    except Exception as error:
        # The size is only for a check; loading reports what is wrong with the model.
        log.warning("model: size of weights is unknown source=%s error=%s", source, error)
        return None


def _folder_sizes(folder: Path, dtype: str) -> Iterator[int]:
    files = sorted(folder.glob("*.safetensors"))
    if (folder / _INDEX).is_file():
        # A folder can hold the same weights in a second format, which vLLM does not load.
        names = set(json.loads((folder / _INDEX).read_text())["weight_map"].values())
        files = [folder / name for name in sorted(names)]
    for file in files:
        yield from _file_sizes(file, dtype)


def _file_sizes(path: Path, dtype: str) -> Iterator[int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{path} is not a safetensors file")
        header = json.loads(file.read(length))
    for name, tensor in header.items():
        if name != "__metadata__":
            yield _loaded_bytes(tensor["dtype"], tensor["shape"], tensor["data_offsets"], dtype)


def _hub_sizes(name: str, dtype: str) -> Iterator[int]:
    from huggingface_hub import get_safetensors_metadata  # noqa: PLC0415  only for names

    for file in get_safetensors_metadata(name).files_metadata.values():
        for tensor in file.tensors.values():
            yield _loaded_bytes(tensor.dtype, tensor.shape, tensor.data_offsets, dtype)


def _loaded_bytes(
    stored: str, shape: Sequence[int], data_offsets: Sequence[int], dtype: str
) -> int:
    """Return the bytes of a tensor after loading. Loading converts floating-point numbers only."""
    if stored in _CONVERTED and dtype in _LOADED_BYTES:
        return math.prod(shape) * _LOADED_BYTES[dtype]
    begin, end = data_offsets
    return end - begin
