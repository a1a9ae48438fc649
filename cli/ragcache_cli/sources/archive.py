"""Reads documents from archives that are not trusted.

Only regular files with a document's suffix are written, each under a number, so a member's name is
never a local path. A name that leads out of the archive rejects all of it. Links and devices are
ignored.
"""

from __future__ import annotations

import gzip
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

from ragcache_cli.sources.documents import LARGEST_BYTES, DocumentFile
from ragcache_cli.sources.reading import (
    RejectedDocument,
    Scratch,
    SourceContents,
    checked_number,
    is_hidden,
)
from ragcache_core.documents.formats import suffix_of
from ragcache_core.errors import InvalidInput, TooLarge

MOST_MEMBERS = 200_000
"""Limit of members of all kinds."""
MOST_UNPACKED_BYTES = 4 << 30
"""Limit of uncompressed bytes, ignored members included; it bounds the time."""
_LONGEST_HEADER_BYTES = 1 << 20
_PIECE_BYTES = 1 << 16
_ENCRYPTED = 0x1
_EXTENSIONS = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)


def read_tar_gz(what: str, path: Path, scratch: Scratch) -> SourceContents:
    """Read a compressed tar archive; a single top folder is not part of the ids.

    Raises InvalidInput or TooLarge, with ``what`` as the field.
    """
    with _judged(what), gzip.open(path, "rb") as stream:
        return _unwrapped(*_read_tar(what, cast(IO[bytes], stream), scratch))


def read_tar(what: str, stream: IO[bytes], scratch: Scratch) -> SourceContents:
    """Read a tar stream once, from front to end. Raises the same errors."""
    with _judged(what):
        return _read_tar(what, stream, scratch)[0]


def read_zip(what: str, path: Path, scratch: Scratch) -> SourceContents:
    """Read a zip archive; a single top folder is not part of the ids. Raises the same errors."""
    found = _Found(what, scratch)
    with _judged(what), zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        _check_members(what, len(members))
        for member in members:
            parts = _parts(what, member.filename)
            kind = stat.S_IFMT(member.external_attr >> 16)
            # Archives from other systems than Unix have no file types.
            if member.is_dir() or kind not in (0, stat.S_IFREG) or not found.is_wanted(parts):
                found.pass_over(parts, is_folder=member.is_dir())
                continue
            if member.flag_bits & _ENCRYPTED:
                raise InvalidInput(what, "is encrypted", "publish it without a password")
            with archive.open(member) as contents:
                found.add(parts, contents)
    return _unwrapped(found.reading(), found.tops)


def _read_tar(what: str, stream: IO[bytes], scratch: Scratch) -> tuple[SourceContents, set[str]]:
    found = _Found(what, scratch)
    bounded = cast(IO[bytes], _Bounded(what, stream))
    with tarfile.open(fileobj=bounded, mode="r|", tarinfo=_BoundedInfo) as tar:
        for number, member in enumerate(tar):
            _check_members(what, number + 1)
            parts = _parts(what, member.name)
            if member.isreg() and not member.issparse() and found.is_wanted(parts):
                contents = tar.extractfile(member)
                assert contents is not None
                found.add(parts, contents)
            else:
                found.pass_over(parts, is_folder=member.isdir())
    return found.reading(), found.tops


class _Found:
    """Collects the documents of an archive. ``tops`` are its top folders, "" for a top file."""

    def __init__(self, what: str, scratch: Scratch) -> None:
        self._what = what
        self._scratch = scratch
        self._files: dict[str, DocumentFile] = {}
        self._refused: dict[str, RejectedDocument] = {}
        self._skipped = 0
        self.tops: set[str] = set()

    def is_wanted(self, parts: tuple[str, ...]) -> bool:
        """Return whether a file of this name is a document."""
        return bool(parts) and suffix_of(parts[-1]) is not None and not is_hidden(parts)

    def pass_over(self, parts: tuple[str, ...], *, is_folder: bool) -> None:
        """Count a member that is not a document."""
        self._skipped += bool(parts) and not is_folder
        self._see(parts, is_folder=is_folder)

    def _see(self, parts: tuple[str, ...], *, is_folder: bool) -> None:
        if parts:
            self.tops.add(parts[0] if is_folder or len(parts) > 1 else "")

    def add(self, parts: tuple[str, ...], contents: IO[bytes]) -> None:
        """Add a document; a repeated name replaces the first one, as unpacking would."""
        self._see(parts, is_folder=False)
        key = "/".join(parts)
        self._forget(key)
        path = self._scratch.new_path(suffix_of(parts[-1]) or "")
        num_bytes = _copy(self._what, contents, path, self._scratch)
        if num_bytes > LARGEST_BYTES:
            path.unlink()
            self._scratch.give_back(num_bytes)
            self._refused[key] = RejectedDocument(
                key, f"is over {LARGEST_BYTES >> 20} MiB; split it"
            )
        else:
            self._files[key] = DocumentFile(key, path)
        checked_number(self._what, len(self._files) + len(self._refused))

    def reading(self) -> SourceContents:
        """Return the documents found, by id."""
        return SourceContents(
            tuple(self._files[key] for key in sorted(self._files)),
            tuple(self._refused[key] for key in sorted(self._refused)),
            skipped=self._skipped,
        )

    def _forget(self, key: str) -> None:
        self._refused.pop(key, None)
        old = self._files.pop(key, None)
        if old is not None:
            self._scratch.give_back(old.path.stat().st_size)
            old.path.unlink()


class _Bounded:
    """A stream that fails when it exceeds a limit."""

    def __init__(self, what: str, stream: IO[bytes]) -> None:
        self._what = what
        self._stream = stream
        self._left_bytes = MOST_UNPACKED_BYTES

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise TooLarge(
                self._what,
                f"unpacks to more than {MOST_UNPACKED_BYTES >> 30} GiB",
                "publish an archive of the documents alone",
            )
        return data


class _BoundedInfo(tarfile.TarInfo):
    """A member with a bounded extended header, because the library reads headers whole."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _BoundedInfo:
        info = super().frombuf(buf, encoding, errors)
        if info.type in _EXTENSIONS and info.size > _LONGEST_HEADER_BYTES:
            raise tarfile.ReadError("a header of absurd length")
        return info


def _copy(what: str, contents: IO[bytes], path: Path, scratch: Scratch) -> int:
    """Write contents up to just over the size limit; return the number of bytes."""
    written = 0
    with path.open("wb") as file:
        while written <= LARGEST_BYTES and (piece := contents.read(_PIECE_BYTES)):
            scratch.take(len(piece), what)
            file.write(piece)
            written += len(piece)
    return written


def _parts(what: str, name: str) -> tuple[str, ...]:
    """Split a member's path. Raises InvalidInput for a path that leads out of the archive."""
    # A backslash separates folders on Windows only, so such a name is rejected.
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        raise InvalidInput(
            what, f"holds {name[:80]!r}, which leads out of it", "make the archive again"
        )
    return parts


def _check_members(what: str, number: int) -> None:
    if number > MOST_MEMBERS:
        raise TooLarge(
            what,
            f"holds more than {MOST_MEMBERS} files",
            "publish an archive of the documents alone",
        )


def _unwrapped(reading: SourceContents, tops: set[str]) -> SourceContents:
    """Return ids without the archive's single top folder.

    Its name often has a version, and a document must keep its id across versions.
    """
    if len(tops) != 1 or "" in tops:
        return reading
    cut = len(next(iter(tops))) + 1
    return replace(
        reading,
        files=tuple(replace(file, id=file.id[cut:]) for file in reading.files),
        refused=tuple(replace(one, id=one.id[cut:]) for one in reading.refused),
    )


@contextmanager
def _judged(what: str) -> Iterator[Any]:
    """Report a broken archive as InvalidInput."""
    try:
        yield
    except (
        *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError),
        # The zip module raises these for unknown methods and inconsistent headers.
        *(NotImplementedError, ValueError, RuntimeError, OverflowError, OSError),
    ) as error:
        raise InvalidInput(
            what, f"cannot be unpacked ({error})", "make the archive again"
        ) from error
