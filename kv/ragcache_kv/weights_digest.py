"""The digest of a model's weights files. Several threads read them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final

from ragcache_core.identity.weights_sample import hashed_ranges, read_tensors
from ragcache_kv.safetensors_header import LENGTH_BYTES, read_header

_THREADS: Final = 16
"""Reads in parallel. A network disk answers each one after about a millisecond."""


def digest_weights(folder: Path, names: Sequence[str], vocabulary: int) -> bytes:
    """Return a digest that tells the weights of models apart (``weights_sample``).

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
