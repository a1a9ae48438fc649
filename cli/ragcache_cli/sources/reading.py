"""The result of reading a source: documents as files, and rejected documents."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ragcache_cli.sources.documents import DocumentFile, documents_in, read_fields
from ragcache_core.documents.formats import DocumentFormat
from ragcache_core.errors import InvalidInput

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
    ``revision`` is a commit, or empty for sources without one.
    """

    files: tuple[DocumentFile, ...]
    refused: tuple[RejectedDocument, ...] = ()
    revision: str = ""


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
