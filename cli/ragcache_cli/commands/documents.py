"""Documents as files: which files a path means, their ids and their text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ragcache_core.errors import InvalidInput, TooLarge

CONTENT_TYPES = {".md": "text/markdown", ".markdown": "text/markdown", ".txt": "text/plain"}
LARGEST_BYTES = 8 << 20
"""What the gateway takes in one request; more is a book to be split, or not text."""


@dataclass(frozen=True, slots=True)
class DocumentFile:
    """One file to ingest. id: its path relative to the folder given, '/' between names."""

    id: str
    path: Path

    @property
    def content_type(self) -> str:
        """Media type, by the file's ending."""
        return CONTENT_TYPES[self.path.suffix.lower()]


@dataclass(frozen=True, slots=True)
class Selection:
    """What the paths given mean. refused: files named that cannot be documents, each with why."""

    files: tuple[DocumentFile, ...]
    refused: tuple[InvalidInput, ...]


def select(paths: Iterable[Path]) -> Selection:
    """Text and Markdown files at and below paths, by id; hidden files and folders left aside.

    A folder's other files are passed over; a file named itself is refused if it is of another
    kind. Two files that would have one id are refused. Raises InvalidInput for a path that is not
    there.
    """
    chosen: dict[str, DocumentFile] = {}
    refused: list[InvalidInput] = []
    for path in paths:
        if path.is_dir():
            found = _below(path)
        elif not path.exists():
            raise InvalidInput("PATH", f"{path} does not exist", "name files or folders")
        # A pipe or a device would be read for ever.
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
    """Text of a document. Raises InvalidInput for what is no readable text of bounded size."""
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
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(place, name)
            is_document = not name.startswith(".") and path.suffix.lower() in CONTENT_TYPES
            if is_document and path.is_file():
                yield DocumentFile(path.relative_to(folder).as_posix(), path)
