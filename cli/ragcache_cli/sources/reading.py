"""The result of reading a source: documents as files, and rejected documents."""

from __future__ import annotations

from dataclasses import dataclass

from ragcache_cli.sources.documents import CONTENT_TYPES, DocumentFile
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


def suffix_of(name: str) -> str | None:
    """Return the document suffix of a name in lower case, or None for another kind of file."""
    ending = f".{name.rpartition('.')[2].lower()}" if "." in name else ""
    return ending if ending in CONTENT_TYPES else None


def is_hidden(parts: tuple[str, ...]) -> bool:
    """Return whether a file or one of its parent folders is hidden."""
    return any(part.startswith(".") for part in parts)


def checked_number(what: str, number: int) -> None:
    """Raise InvalidInput for more documents than one source may have."""
    if number > MOST_DOCUMENTS:
        raise InvalidInput(
            what,
            f"holds more than {MOST_DOCUMENTS} documents",
            "name a folder in it, or spread them over several sources",
        )
