"""The weights of a model: the size that they have in memory, and a digest that tells them apart.

The size follows from the headers or the sizes of the files. The engine refuses to start if the
weights do not fit. So wherever a folder can be read in two ways, the smaller size counts.

A safetensors file begins with a header, a JSON object that describes each tensor.

Source: https://huggingface.co/docs/safetensors, section Format.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final

from ragcache_core.identity.fingerprint import hashed_ranges, read_tensors

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


log = logging.getLogger("ragcache.model")

_CONVERTED: Final = ("F64", "F32", "F16", "BF16")
"""Types of safetensors that loading converts."""
_LOADED_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one number, by the type that it is converted to."""
_AUTO_BYTES: Final = 2
"""The most bytes of one number under ``auto``: vLLM then converts float32 to 16 bits."""


def read_weights_bytes(source: str, dtype: str) -> int | None:
    """Return the size of a model's weights after loading, in bytes. None if it is unknown.

    It reads headers and no weights, also of a model of the Hugging Face hub.

    Args:
        source: A folder, or a Hugging Face name, with ``@COMMIT`` if it is pinned.
        dtype: The type that weights are converted to. ``auto`` is the stored type, except that
            float32 becomes a type of 16 bits.
    """
    folder = Path(source)
    try:
        num_bytes = _folder_bytes(folder, dtype) if folder.is_dir() else _hub_bytes(source, dtype)
    except Exception as error:
        # The size is only for a check; loading reports what is wrong with the model.
        log.warning("model: size of weights is unknown source=%s error=%s", source, error)
        return None
    if not num_bytes:
        log.warning("model: size of weights is unknown source=%s error=no known files", source)
        return None
    return num_bytes


def _folder_bytes(folder: Path, dtype: str) -> int:
    """Return the size of the format that vLLM loads; 0 if there is none with a known size.

    With ``--load-format=auto`` vLLM prefers Mistral's files, named ``consolidated``, and with
    ``safetensors`` the other ones. A pickle is loaded only if there are no safetensors.

    Source: ``_prepare_weights`` in vLLM's ``model_loader/default_loader.py``.
    """
    formats = [_files(folder, "consolidated"), _files(folder, "model")]
    formats = [files for files in formats if files] or [sorted(folder.glob("*.safetensors"))]
    sizes = [_files_bytes(files, dtype) for files in formats if files]
    return min(sizes) if sizes else _pickles_bytes(folder, dtype)


def _files(folder: Path, name: str) -> list[Path]:
    """Return the safetensors files of a format: those of its index, or those with its name."""
    index = folder / f"{name}.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return [folder / name for name in sorted(names)]
    return sorted(folder.glob(f"{name}*.safetensors"))


def _files_bytes(files: Iterable[Path], dtype: str) -> int:
    """Return the size of the tensors of files. A tensor in several files is loaded into one."""
    tensors: dict[str, int] = {}
    for file in files:
        for name, num_bytes in _file_sizes(file, dtype).items():
            tensors[name] = min(num_bytes, tensors.get(name, num_bytes))
    return sum(tensors.values())


def _pickles_bytes(folder: Path, dtype: str) -> int:
    """Return the least size of pickled weights, whose types are unknown without unpickling."""
    single = folder / "pytorch_model.bin"
    files = [single] if single.is_file() else folder.glob("pytorch_model-*.bin")
    stored_bytes = sum(file.stat().st_size for file in files)
    return stored_bytes if dtype == "float32" else stored_bytes // 2


def _file_sizes(path: Path, dtype: str) -> Mapping[str, int]:
    """Return the bytes of each tensor of a file after loading."""
    with path.open("rb") as file:
        header = json.loads(read_header(file))
    return {
        name: _loaded_bytes(tensor["dtype"], tensor["shape"], tensor["data_offsets"], dtype)
        for name, tensor in header.items()
        if name != "__metadata__"
    }


def _hub_bytes(source: str, dtype: str) -> int:
    from huggingface_hub import get_safetensors_metadata  # noqa: PLC0415  only for names

    name, _, commit = source.partition("@")
    metadata = get_safetensors_metadata(name, revision=commit or None)
    return sum(
        _loaded_bytes(tensor.dtype, tensor.shape, tensor.data_offsets, dtype)
        for file in metadata.files_metadata.values()
        for tensor in file.tensors.values()
    )


def _loaded_bytes(
    stored: str, shape: Sequence[int], data_offsets: Sequence[int], dtype: str
) -> int:
    """Return the bytes of a tensor after loading. Loading converts floating-point numbers only."""
    begin, end = data_offsets
    if stored not in _CONVERTED:
        return end - begin
    count = math.prod(shape)
    if dtype in _LOADED_BYTES:
        return count * _LOADED_BYTES[dtype]
    return min(end - begin, count * _AUTO_BYTES)


_THREADS: Final = 16
"""Reads in parallel. A network disk answers each one after about a millisecond."""


def digest_weights(folder: Path, names: Sequence[str], vocabulary: int) -> bytes:
    """Return a digest that tells the weights of models apart (``hashed_ranges``).

    Args:
        folder: The model's folder.
        names: Paths of its safetensors files in the folder, in any order.
        vocabulary: Number of tokens that the model knows; 0: unknown.

    Raises:
        ValueError: A file is not in the format safetensors, or ends too early.
        OSError: A file cannot be read.
    """
    hasher = hashlib.blake2b(digest_size=32, person=b"ragcache-weights")
    with ExitStack() as stack:
        files: list[BinaryIO] = []
        tensors = []
        for name in sorted(names):
            file = stack.enter_context((folder / name).open("rb"))
            size, header = os.fstat(file.fileno()).st_size, read_header(file)
            hasher.update(f"{name}\0{size}\0{len(header)}\0".encode() + header)
            try:
                tensors.append(read_tensors(header, range(LENGTH_BYTES + len(header), size)))
            except ValueError as error:
                raise ValueError(f"{file.name} is damaged: {error}") from error
            files.append(file)
            if hasattr(os, "posix_fadvise"):
                # Otherwise the kernel reads 32 times as much as a slice.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        groups = [
            (file, group)
            for file, of_file in zip(files, hashed_ranges(tensors, vocabulary), strict=True)
            for group in of_file
        ]
        with ThreadPoolExecutor(_THREADS, "ragcache-weights") as pool:
            for digest in pool.map(lambda one: _digest(*one), groups):
                hasher.update(digest)
    return hasher.digest()


def _digest(file: BinaryIO, ranges: Sequence[range]) -> bytes:
    hasher = hashlib.blake2b(digest_size=32)
    for positions in ranges:
        start = positions.start
        while start < positions.stop:
            part = os.pread(file.fileno(), positions.stop - start, start)
            if not part:
                raise ValueError(f"{file.name} ends at byte {start}")
            hasher.update(part)
            start += len(part)
    return hasher.digest()
