"""The result of reading a source, and its limits: disk space for downloads, and time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ragcache_cli.sources.documents import DocumentFile, documents_in, read_fields
from ragcache_core.documents.formats import DocumentFormat
from ragcache_core.errors import InvalidInput, TooLarge, Unavailable
from ragcache_wire.address_gate import AddressGate

MOST_DOCUMENTS = 50_000
"""Limit for one source, because names are kept in memory."""


@dataclass(frozen=True, slots=True)
class RejectedDocument:
    """A document that cannot be read; ``problem`` names the fix."""

    id: str
    problem: str


@dataclass(frozen=True, slots=True)
class SourceContents:
    """The documents of a source.

    ``files`` maps ids relative to the source to files. ``refused`` are rejected documents.
    ``revision`` is a commit, or empty for sources without one. ``skipped`` counts hidden files,
    files of other kinds, and what is no file.
    """

    files: tuple[DocumentFile, ...]
    refused: tuple[RejectedDocument, ...] = ()
    revision: str = ""
    skipped: int = 0


def is_hidden(parts: tuple[str, ...]) -> bool:
    """Return whether a file or one of its parent folders is hidden."""
    return any(part.startswith(".") for part in parts)


def with_lines(what: str, reading: SourceContents) -> SourceContents:
    """Return the contents with a document for each line of JSON, under the id that it names.

    Raises:
        InvalidInput: A line cannot be read. The source is then invalid as a whole: the id of the
            document is unknown, and a sync would delete it.
    """
    files: list[DocumentFile] = []
    for file in documents_in(reading.files):
        if file.kind is DocumentFormat.JSON_LINES:
            try:
                files.append(replace(file, id=read_fields(file)["id"]))
            except InvalidInput as error:
                number = 0 if file.line is None else file.line.number
                problem = f"line {number} of {file.id} {error.problem}"
                raise InvalidInput(what, problem, error.fix) from error
        else:
            files.append(file)
        checked_number(what, len(files))
    return replace(reading, files=tuple(files))


def checked_number(what: str, number: int) -> None:
    """Raise InvalidInput for more documents than one source may have."""
    if number > MOST_DOCUMENTS:
        raise InvalidInput(
            what,
            f"holds more than {MOST_DOCUMENTS} documents",
            "name a folder in it, or spread them over several sources",
        )


class Scratch:
    """A folder of bounded size, for all sources of one sync.

    Files are named by number, so that no external name becomes a local path.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._numbers = itertools.count()
        self.free_bytes = most_bytes

    def new_path(self, suffix: str = "") -> Path:
        """Return a new path."""
        return self._folder / f"{next(self._numbers)}{suffix}"

    def take(self, num_bytes: int, what: str) -> None:
        """Reserve bytes before they are written. Raises TooLarge with the field ``what``."""
        if num_bytes > self.free_bytes:
            raise TooLarge(
                what,
                f"with the sources before it takes more than {self._most_bytes >> 20} MiB",
                "name fewer documents, or spread them over several RagCollections",
            )
        self.free_bytes -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Return bytes that were deleted."""
        self.free_bytes += num_bytes


class Deadline:
    """A time limit."""

    def __init__(self, after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._after_s = after_s
        self._clock = clock
        self._at = clock() + after_s

    def left_s(self, what: str) -> float:
        """Return the seconds left. Raises Unavailable for ``what`` if there are none."""
        left_s = self._at - self._clock()
        if left_s <= 0:
            raise self.missed(what)
        return left_s

    def missed(self, what: str) -> Unavailable:
        """Return the error for a missed deadline."""
        return Unavailable(what, f"it took longer than {self._after_s:g} s")


@dataclass(frozen=True, slots=True)
class Fetching:
    """What reading a source over the network needs: hosts that it may have, space and time."""

    gate: AddressGate
    scratch: Scratch
    deadline: Deadline
