"""The file of a base, in the folder of its index. It is complete or absent.

The name has a number, the kind and a checksum. A base is written under a temporary name, made
durable and renamed. Then earlier ones are removed. A process that is killed leaves the one before.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import faiss
import numpy as np
import xxhash

from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.search.faiss_base import FaissBase, Precision
from ragcache_retriever.search.faiss_build import VectorSource
from ragcache_retriever.search.vector_index import Rows, Vectors

_SUFFIX: Final = ".faiss"
_DRAFT: Final = "draft"
_BLOCK_BYTES: Final = 8 << 20


class DamagedIndex(Exception):
    """The file of an index cannot be used. The index has to be built again from the documents."""


def write_base(folder: Path, base: FaissBase) -> None:
    """Make a base durable, and remove the one before. A base without vectors has no file."""
    folder.mkdir(parents=True, exist_ok=True)
    before = _files(folder)
    if len(base):
        draft = folder / _DRAFT
        try:
            faiss.write_index(base.with_rows, str(draft))
            _synchronize(draft)
        except BaseException:
            draft.unlink(missing_ok=True)  # the disk may be full
            raise
        number = 1 + max((_number(path) for path in before), default=0)
        draft.rename(folder / f"{number}-{base.kind}-{_checksum(draft)}{_SUFFIX}")
        _synchronize(folder)
    for path in before:
        path.unlink()


def read_base(folder: Path, dimension: int, precision: Precision) -> FaissBase | None:
    """Return the base of a folder. None: it has none.

    Raises:
        DamagedIndex: Its file has other content than was written, or other vectors than wanted.
    """
    (folder / _DRAFT).unlink(missing_ok=True)  # of a killed process
    path = max(_files(folder), key=_number, default=None)
    if path is None:
        return None
    try:
        _, kind, checksum = path.stem.split("-")
        if _checksum(path) != checksum:
            raise DamagedIndex(f"{path} has other content than was written")
        found = FaissBase(IndexKind(kind), precision, faiss.read_index(str(path)))
    except (OSError, ValueError, RuntimeError) as error:
        raise DamagedIndex(f"{path} cannot be read: {error}") from error
    is_exact = isinstance(found.index, faiss.IndexIVFFlat | faiss.IndexHNSWFlat)
    if (found.index.d, is_exact) != (dimension, precision == "float32"):
        raise DamagedIndex(f"{path} has vectors of another dimension or precision")
    return found


@contextmanager
def spooled(
    folder: Path | None, dimension: int, batches: Iterable[tuple[Rows, Vectors]]
) -> Iterator[VectorSource]:
    """Collect batches in a file of a folder, so that vectors are in memory once.

    Args:
        folder: Of the index. None: the system's folder for temporary files.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        all_rows = [np.empty(0, np.int64)]
        for rows, vectors in batches:
            all_rows.append(np.asarray(rows, np.int64))
            file.write(np.ascontiguousarray(vectors, np.float32).tobytes())
        file.flush()
        rows = np.concatenate(all_rows)
        order = np.argsort(rows, kind="stable")
        mapped: Vectors = np.empty((0, dimension), np.float32)
        if len(rows):
            mapped = np.memmap(file, np.float32, "r", shape=(len(rows), dimension))
        yield VectorSource(rows[order], lambda indexes: np.asarray(mapped[order[indexes]]))


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.glob(f"*-*-*{_SUFFIX}") if path.name.split("-")[0].isdecimal()]


def _number(path: Path) -> int:
    return int(path.name.split("-")[0])


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _synchronize(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
