"""What every kind of source comes down to: documents as files, and what could not be one."""

from __future__ import annotations

from dataclasses import dataclass

from ragcache_cli.commands.documents import CONTENT_TYPES, DocumentFile
from ragcache_core.errors import InvalidInput

MOST_DOCUMENTS = 50_000
"""Of one source; their names are held in memory."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A document that cannot be had. problem: with its fix."""

    id: str
    problem: str


@dataclass(frozen=True, slots=True)
class Reading:
    """A source as it was read.

    files: its documents, ids relative to the source. refused: what else would be one.
    revision: of a source that has a name for it (a commit); empty where the contents are all.
    """

    files: tuple[DocumentFile, ...]
    refused: tuple[Refused, ...] = ()
    revision: str = ""


def suffix_of(name: str) -> str | None:
    """The ending that makes a name a document's, in lower case; None for what is no document."""
    ending = f".{name.rpartition('.')[2].lower()}" if "." in name else ""
    return ending if ending in CONTENT_TYPES else None


def is_hidden(parts: tuple[str, ...]) -> bool:
    """Whether a file or a folder above it is hidden."""
    return any(part.startswith(".") for part in parts)


def checked_number(what: str, number: int) -> None:
    """Raises InvalidInput for more documents than one source may have."""
    if number > MOST_DOCUMENTS:
        raise InvalidInput(
            what,
            f"holds more than {MOST_DOCUMENTS} documents",
            "name a folder in it, or spread them over several sources",
        )
