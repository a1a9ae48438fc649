"""Layers: files in one order, with no times, so that equal content has equal digests."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import marshal
import os
import stat
import struct
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, Final

_CHUNK_BYTES: Final = 1 << 20
_UNCHECKED_HASH: Final = 0b01
"""Flags of bytecode that is never compared with its source (PEP 552)."""
_TIMESTAMP: Final = 0b00
_PYC_HEADER_BYTES: Final = 16
_KEPT_S: Final = 14 * 24 * 3600
"""Layers nobody asked for in this time are of environments that are gone."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One path of a layer, without a leading slash.

    content: a file's path or bytes; None for a folder or link. link: a symbolic link's target.
    """

    path: str
    content: Path | bytes | None = None
    mode: int = 0o644
    link: str | None = None
    uid: int = 0
    gid: int = 0


@dataclass(frozen=True, slots=True)
class Layer:
    """An uncompressed layer on disk. digest: of its bytes, ``sha256:...``."""

    path: Path
    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Layers by a key of everything they are made from."""

    folder: Path

    def get(self, inputs: object, entries: Callable[[], Iterable[Entry]]) -> Layer:
        """The layer of inputs (JSON), made from entries if there is none yet."""
        key = digest_of(json.dumps(inputs, sort_keys=True).encode())
        path = self.folder / f"{key}.tar"
        note = self.folder / f"{key}.digest"
        if not note.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
                digest = write_layer(file, entries())
            os.replace(file.name, path)
            # Last, so that a note stands for a whole layer.
            note.write_text(f"sha256:{digest}")
        os.utime(note)
        return Layer(path, note.read_text(), path.stat().st_size)

    def prune(self, now_s: float | None = None) -> None:
        """Remove layers that were not asked for lately."""
        oldest = (time.time() if now_s is None else now_s) - _KEPT_S
        for note in self.folder.glob("*.digest"):
            if note.stat().st_mtime < oldest:
                note.unlink()
                note.with_suffix(".tar").unlink(missing_ok=True)


def digest_of(content: bytes) -> str:
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def write_layer(file: IO[bytes], entries: Iterable[Entry]) -> str:
    """Write entries, sorted, as a tar; the hexadecimal SHA-256 of what was written.

    Bytecode of Python is written so that it stays valid although files have no times.
    """
    hashing = _Hashing(file)
    with tarfile.open(
        fileobj=hashing, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_CHUNK_BYTES
    ) as tar:
        for entry in sorted(entries, key=lambda entry: entry.path):
            _add(tar, entry)
    return hashing.hexdigest()


def folder_entries(folder: Path, target: str) -> list[Entry]:
    """A folder's files as target, readable for everyone, with the folders above them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return with_parents(
        Entry(f"{target.strip('/')}/{path.relative_to(folder)}", path) for path in files
    )


def with_parents(entries: Iterable[Entry]) -> list[Entry]:
    """Entries and every folder above them that is not among them."""
    given = list(entries)
    have = {entry.path for entry in given}
    parents = {
        str(parent)
        for entry in given
        for parent in PurePosixPath(entry.path).parents
        if str(parent) != "."
    }
    return [*(Entry(path, mode=0o755) for path in sorted(parents - have)), *given]


def held(entries: Iterable[Entry]) -> list[Entry]:
    """Entries that carry their files' content, for files that are about to go away."""
    return [
        replace(entry, content=entry.content.read_bytes())
        if isinstance(entry.content, Path)
        else entry
        for entry in entries
    ]


def portable_bytecode(source: Path, shown: str) -> bytes | None:
    """Compile a module to bytecode that is valid for any source time; None if that fails.

    Existing bytecode beside the source is reused. ``shown`` is the path in tracebacks otherwise.
    """
    content = source.read_bytes()
    cached = Path(importlib.util.cache_from_source(str(source)))
    code = _fresh_code(cached, source)
    if code is None:
        try:
            with warnings.catch_warnings(action="ignore"):
                code = marshal.dumps(compile(content, shown, "exec", dont_inherit=True))
        except (SyntaxError, ValueError):  # templates, and tests of what cannot be parsed
            return None
    header = importlib.util.MAGIC_NUMBER + struct.pack("<I", _UNCHECKED_HASH)
    return header + importlib.util.source_hash(content) + code


def _fresh_code(cached: Path, source: Path) -> bytes | None:
    """The code in a compiled file, if this interpreter made it from source as it is now."""
    try:
        compiled = cached.read_bytes()
    except OSError:
        return None
    if len(compiled) < _PYC_HEADER_BYTES or compiled[:4] != importlib.util.MAGIC_NUMBER:
        return None
    flags, modified_s, size = struct.unpack("<3I", compiled[4:_PYC_HEADER_BYTES])
    state = source.stat()
    as_it_is = (_TIMESTAMP, int(state.st_mtime) & 0xFFFFFFFF, state.st_size & 0xFFFFFFFF)
    return compiled[_PYC_HEADER_BYTES:] if (flags, modified_s, size) == as_it_is else None


def _add(tar: tarfile.TarFile, entry: Entry) -> None:
    info = tarfile.TarInfo(entry.path)
    info.mode = stat.S_IMODE(entry.mode)
    info.uid, info.gid = entry.uid, entry.gid
    if entry.link is not None:
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, entry.link, 0o777
        tar.addfile(info)
    elif entry.content is None:
        info.type = tarfile.DIRTYPE
        tar.addfile(info)
    elif isinstance(entry.content, bytes):
        info.size = len(entry.content)
        tar.addfile(info, io.BytesIO(entry.content))
    else:
        with entry.content.open("rb") as file:
            info.size = os.fstat(file.fileno()).st_size
            tar.addfile(info, file)


class _Hashing(io.RawIOBase):
    """A file that is written and hashed at once."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, content: bytes, /) -> int:  # type: ignore[override]
        self._hash.update(content)
        return self._file.write(content)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()
