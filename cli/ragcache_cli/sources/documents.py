"""Selects the files to ingest, with their document ids and their content."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from ragcache_cli.sources.skipped import SkippedFile, SkipReason
from ragcache_core.documents.formats import FORMAT_OF_SUFFIX, DocumentFormat, suffix_of
from ragcache_core.errors import InvalidInput, TooLarge
from ragcache_core.retrieval.metadata import name_of

LARGEST_BYTES = 8 << 20
"""The gateway's limit for one document."""


@dataclass(frozen=True, slots=True)
class LineSpan:
    """The bytes of one line of a file. ``number`` counts from 1."""

    number: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class DocumentFile:
    """One document to ingest.

    Args:
        id: Path of the file relative to the given folder, or the id that a line of JSON has.
        line: The line that has the document; None: the whole file.
        inside: Real path of a folder that the file is in when it is opened; None: anywhere. Another
            process may replace it by a link after it was found.
    """

    id: str
    path: Path
    line: LineSpan | None = None
    inside: Path | None = None

    def opened(self) -> BinaryIO:
        """Open the file to read. Raises OSError, also if it is a link out of its folder."""
        opened = self.path.open("rb")
        if self.inside is not None and not _real_path(opened).is_relative_to(self.inside):
            opened.close()
            raise OSError(errno.EXDEV, "it is a link out of its source")
        return opened

    @property
    def kind(self) -> DocumentFormat:
        """The format by the file's suffix."""
        return FORMAT_OF_SUFFIX[self.path.suffix.lower()]

    @property
    def where(self) -> str:
        """Where the document is, for messages."""
        return str(self.path) if self.line is None else f"{self.path}:{self.line.number}"


@dataclass(frozen=True, slots=True)
class Selection:
    """The files that were selected.

    Args:
        refused: Named files that cannot be ingested, with the reason.
        skipped: What else the folders have.
    """

    files: tuple[DocumentFile, ...]
    refused: tuple[InvalidInput, ...]
    skipped: tuple[SkippedFile, ...]


def _real_path(opened: BinaryIO) -> Path:
    """Return where a file that was opened is. Where the system does not tell, follow its path."""
    link = Path(f"/proc/self/fd/{opened.fileno()}")
    return link.readlink() if link.exists() else Path(opened.name).resolve()


def select(paths: Iterable[Path]) -> Selection:
    """Select files of known formats at and below the paths, by id, without hidden ones.

    Other files of a folder are skipped. A named file of another kind is refused, and so are two
    files with the same id.

    Raises:
        InvalidInput: A path does not exist.
    """
    chosen: dict[str, DocumentFile] = {}
    refused: list[InvalidInput] = []
    skipped: list[SkippedFile] = []
    for path in paths:
        if path.is_dir():
            found = _below(path, refused, skipped)
        elif not path.exists():
            raise InvalidInput("PATH", f"{path} does not exist", "name files or folders")
        # Reading a pipe or a device might never end.
        elif path.is_file() and suffix_of(path.name):
            found = iter([DocumentFile(path.name, path)])
        else:
            fix = f"convert it to one of {', '.join(FORMAT_OF_SUFFIX)}"
            refused.append(InvalidInput(str(path), "is of another kind", fix))
            continue
        for file in found:
            other = chosen.setdefault(file.id, file)
            if not other.path.samefile(file.path):
                problem = f"has the id {file.id!r}, as {other.path} has"
                fix = "ingest the folder above both, or use two collections"
                refused.append(InvalidInput(str(file.path), problem, fix))
    return Selection(tuple(chosen[key] for key in sorted(chosen)), tuple(refused), tuple(skipped))


def documents_in(files: Iterable[DocumentFile]) -> Iterator[DocumentFile]:
    """Yield each document of the files: a file of JSON lines has one per line.

    A file that cannot be read is yielded as it is; reading its content then says why.
    """
    for file in files:
        if file.kind is not DocumentFormat.JSON_LINES:
            yield file
            continue
        try:
            for span in _lines(file):
                yield replace(file, line=span)
        except OSError:
            yield file


def num_documents(files: Iterable[DocumentFile]) -> int:
    """Return how many documents the files have."""
    return sum(1 for _ in documents_in(files))


def read_content(file: DocumentFile) -> bytes:
    """Read the bytes of a document.

    Raises:
        InvalidInput: The file cannot be read, or exceeds the size limit.
    """
    span = file.line
    limit_bytes = LARGEST_BYTES + 1 if span is None else min(span.size, LARGEST_BYTES + 1)
    try:
        with file.opened() as opened:
            opened.seek(0 if span is None else span.start)
            content = opened.read(limit_bytes)
    except OSError as error:
        raise InvalidInput(
            file.where, f"cannot be read: {error.strerror}", "check its permissions"
        ) from error
    if len(content) > LARGEST_BYTES:
        raise TooLarge(file.where, f"is over {LARGEST_BYTES >> 20} MiB", "split it")
    return content


def read_fields(file: DocumentFile) -> dict[str, Any]:
    """Read the fields of a document that is a line of JSON. Raises InvalidInput."""
    try:
        fields = json.loads(read_content(file))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(file.where, "is no JSON", "write one JSON object per line") from error
    name = name_of(fields.get("id")) if isinstance(fields, dict) else None
    if name is None:
        raise InvalidInput(file.where, "has no id", 'write {"id": ..., "text": ...} on each line')
    return {**fields, "id": name}


def _lines(file: DocumentFile) -> Iterator[LineSpan]:
    """Yield the lines of a file that are not empty. Raises OSError."""
    start = 0
    with file.opened() as opened:
        # A line over the limit is read in pieces, so that memory stays bounded.
        number, size, has_text = 1, 0, False
        while piece := opened.readline(LARGEST_BYTES):
            size += len(piece)
            has_text = has_text or bool(piece.strip())
            if piece.endswith(b"\n"):
                if has_text:
                    yield LineSpan(number, start, size)
                start += size
                number, size, has_text = number + 1, 0, False
        if has_text:
            yield LineSpan(number, start, size)


def skip_reason(name: str, *, is_folder: bool = False) -> SkipReason | None:
    """Return why a file of this name is no document. None: it is one, or a folder of some."""
    if name.startswith("."):
        return SkipReason.HIDDEN
    return None if is_folder or suffix_of(name) else SkipReason.OTHER_KIND


def _below(
    folder: Path, refused: list[InvalidInput], skipped: list[SkippedFile]
) -> Iterator[DocumentFile]:
    def refuse(error: OSError) -> None:
        problem = f"cannot be read: {error.strerror}"
        refused.append(InvalidInput(str(error.filename), problem, "check its permissions"))

    for parent, folders, names in os.walk(folder, onerror=refuse):
        for name in sorted((*folders, *names)):
            path = Path(parent, name)
            is_folder = path.is_dir()
            reason = skip_reason(name, is_folder=is_folder)
            # Reading a pipe or a device might never end, and a link to a folder may be a circle.
            if reason is None and (path.is_symlink() if is_folder else not path.is_file()):
                reason = SkipReason.NO_FILE
            if reason is not None:
                skipped.append(SkippedFile(str(path), reason))
            elif not is_folder:
                yield DocumentFile(path.relative_to(folder).as_posix(), path)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
