"""Files of an index base: one folder that is complete or absent.

A base is written to a folder with a temporary name, synchronized to disk and renamed. Then
``current.json`` names it. A process that is killed at any moment leaves the base before.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

FORMAT_VERSION: Final = 1
CHECKED_BYTES: Final = 64 << 20
"""Arrays up to this size are checked when a base is opened, larger ones by ``verify``."""

_CURRENT: Final = "current.json"
_MANIFEST: Final = "manifest.json"
_BLOCK_BYTES: Final = 8 << 20

Array = npt.NDArray[Any]


class DamagedIndex(Exception):
    """The files of an index cannot be used. It has to be built again from the documents."""


@dataclass(frozen=True, slots=True)
class OpenedBase:
    """The arrays of a base, mapped from files, and what was written beside them."""

    folder: Path
    arrays: Mapping[str, Array]
    facts: Mapping[str, Any]


class BaseWriter:
    """Writes one base. Arrays are given whole, or filled by the caller.

    Args:
        folder: Of the index. It is made if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._name = f"base-{_next_number(folder)}"
        self._temporary = folder / f"{self._name}.tmp"
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir()
        self._names: list[str] = []

    def put(self, name: str, array: Array) -> None:
        """Write an array."""
        self._names.append(name)
        np.save(self._file(name), np.ascontiguousarray(array), allow_pickle=False)

    def allocate(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return an array in a file for the caller to fill before ``finish``."""
        self._names.append(name)
        if 0 in shape:  # a file of no bytes cannot be mapped
            np.save(self._file(name), np.empty(shape, dtype), allow_pickle=False)
            return np.empty(shape, dtype)
        return np.lib.format.open_memmap(  # type: ignore[no-untyped-call,no-any-return]
            self._file(name), mode="w+", dtype=dtype, shape=shape
        )

    def finish(self, facts: Mapping[str, Any]) -> OpenedBase:
        """Make the base durable and the current one, remove earlier ones, and open it."""
        files = {}
        for name in self._names:
            file = self._file(name)
            _synchronize(file)
            files[name] = {"bytes": file.stat().st_size, "xxh3": _hash(file)}
        manifest = {"version": FORMAT_VERSION, "files": files, "facts": dict(facts)}
        _write(self._temporary / _MANIFEST, {**manifest, "xxh3": _digest(manifest)})
        _synchronize(self._temporary)
        final = self._folder / self._name
        self._temporary.rename(final)
        draft = self._folder / f"{_CURRENT}.tmp"
        _write(draft, {"base": self._name})
        draft.replace(self._folder / _CURRENT)
        _synchronize(self._folder)
        for other in self._folder.glob("base-*"):
            if other != final:
                # Searches may still read a mapped file of it. It goes when they end.
                shutil.rmtree(other, ignore_errors=True)
        opened = open_base(self._folder)
        assert opened is not None, "it was just written"
        return opened

    def abort(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _file(self, name: str) -> Path:
        return self._temporary / f"{name}.npy"


def open_base(folder: Path) -> OpenedBase | None:
    """Map the current base of an index. Return None if the folder has none.

    Raises:
        DamagedIndex: Files are missing, have the wrong size or content, or are of another version.
    """
    current = folder / _CURRENT
    if not current.exists():
        return None
    try:
        base = folder / str(json.loads(current.read_text())["base"])
        manifest = json.loads((base / _MANIFEST).read_text())
        digest = manifest.pop("xxh3")
        if manifest["version"] != FORMAT_VERSION:
            raise DamagedIndex(f"{base} has version {manifest['version']}, not {FORMAT_VERSION}")
        if digest != _digest(manifest):
            raise DamagedIndex(f"{base}/{_MANIFEST} has other content than was written")
        arrays = {name: _open(base, name, file) for name, file in manifest["files"].items()}
        return OpenedBase(base, arrays, manifest["facts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedIndex(f"{folder} cannot be read: {error}") from error


def verify(opened: OpenedBase) -> None:
    """Read every byte of a base and compare its checksums. It also warms the page cache.

    Raises:
        DamagedIndex: A file has other content than was written.
    """
    try:
        manifest = json.loads((opened.folder / _MANIFEST).read_text())
        for name, file in manifest["files"].items():
            if _hash(opened.folder / f"{name}.npy") != file["xxh3"]:
                raise DamagedIndex(f"{opened.folder}/{name}.npy has other content than was written")
    except OSError as error:
        raise DamagedIndex(f"{opened.folder} cannot be read: {error}") from error


def forget_base(opened: OpenedBase) -> None:
    """Let the next ``open_base`` find none, unless another one is current by now."""
    current = opened.folder.parent / _CURRENT
    if current.exists() and json.loads(current.read_text())["base"] == opened.folder.name:
        current.unlink()


def remove_base(folder: Path) -> None:
    """Remove the files of an index."""
    shutil.rmtree(folder, ignore_errors=True)


def _open(base: Path, name: str, file: Mapping[str, Any]) -> Array:
    path = base / f"{name}.npy"
    if path.stat().st_size != file["bytes"]:
        raise DamagedIndex(f"{path} has {path.stat().st_size} bytes, not {file['bytes']}")
    if file["bytes"] <= CHECKED_BYTES and _hash(path) != file["xxh3"]:
        raise DamagedIndex(f"{path} has other content than was written")
    try:
        # As a plain array: slices of a memmap cost ten times as much.
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except ValueError:  # an array of no bytes cannot be mapped
        return np.asarray(np.load(path, allow_pickle=False))


def _next_number(folder: Path) -> int:
    numbers = [
        int(digits)
        for path in folder.glob("base-*")
        if (digits := path.name.removeprefix("base-").removesuffix(".tmp")).isdigit()
    ]
    return max(numbers, default=0) + 1


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _digest(manifest: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content))
    _synchronize(path)


def _synchronize(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
