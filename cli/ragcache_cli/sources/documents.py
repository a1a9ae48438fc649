"""Selects the files to ingest, with their document ids and their text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ragcache_core.errors import InvalidInput, TooLarge

CONTENT_TYPES = {".md": "text/markdown", ".markdown": "text/markdown", ".txt": "text/plain"}
LARGEST_BYTES = 8 << 20
"""The gateway's limit for one request."""


@dataclass(frozen=True, slots=True)
class DocumentFile:
    """One file to ingest. ``id`` is its path relative to the given folder."""

    id: str
    path: Path

    @property
    def content_type(self) -> str:
        """Return the media type by the file's suffix."""
        return CONTENT_TYPES[self.path.suffix.lower()]


@dataclass(frozen=True, slots=True)
class Selection:
    """The files that were selected, and the named files that were refused, with the reason."""

    files: tuple[DocumentFile, ...]
    refused: tuple[InvalidInput, ...]


def select(paths: Iterable[Path]) -> Selection:
    """Select text and Markdown files at and below the paths, by id, without hidden ones.

    Other files of a folder are ignored. A named file of another kind is refused, and so are two
    files with the same id.

    Raises:
        InvalidInput: A path does not exist.
    """
    chosen: dict[str, DocumentFile] = {}
    refused: list[InvalidInput] = []
    for path in paths:
        if path.is_dir():
            found = _below(path)
        elif not path.exists():
            raise InvalidInput("PATH", f"{path} does not exist", "name files or folders")
        # Reading a pipe or a device might never end.
        elif path.is_file() and path.suffix.lower() in CONTENT_TYPES:
            found = iter([DocumentFile(path.name, path)])
        else:
            fix = f"convert it to one of {', '.join(CONTENT_TYPES)}"
            refused.append(InvalidInput(str(path), "is of another kind", fix))
            continue
        for file in found:
            other = chosen.setdefault(file.id, file)
            if not other.path.samefile(file.path):
                problem = f"has the id {file.id!r}, as {other.path} has"
                fix = "ingest the folder above both, or use two collections"
                refused.append(InvalidInput(str(file.path), problem, fix))
    return Selection(tuple(chosen[key] for key in sorted(chosen)), tuple(refused))


def read_text(file: DocumentFile) -> str:
    """Read the text of a document.

    Raises:
        InvalidInput: The file is not readable text within the size limit.
    """
    try:
        with file.path.open("rb") as opened:
            data = opened.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise InvalidInput(
            str(file.path), f"cannot be read: {error.strerror}", "check its permissions"
        ) from error
    if len(data) > LARGEST_BYTES:
        raise TooLarge(str(file.path), f"is over {LARGEST_BYTES >> 20} MiB", "split it")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text (byte {error.start})"
        raise InvalidInput(str(file.path), problem, "convert it to text in UTF-8") from error
    if "\0" in text:
        raise InvalidInput(str(file.path), "is binary", "convert it to text in UTF-8")
    if not text.strip():
        raise InvalidInput(str(file.path), "is empty", "write something, or leave it out")
    return text


def _below(folder: Path) -> Iterator[DocumentFile]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            is_document = not name.startswith(".") and path.suffix.lower() in CONTENT_TYPES
            if is_document and path.is_file():
                yield DocumentFile(path.relative_to(folder).as_posix(), path)
