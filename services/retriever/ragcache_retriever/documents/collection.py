"""A collection's settings: how its documents are cut, what a hit brings along."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ragcache_core.errors import InvalidInput

DEFAULT_COLLECTION = "default"
"""Always exists, so that a newcomer's first document has somewhere to go."""

MIN_CHUNK_TOKENS = 16
MAX_CHUNK_TOKENS = 4096
MAX_WINDOW = 8

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


@dataclass(frozen=True, slots=True)
class Chunking:
    """How documents are cut, in tokens of the serving model.

    size_tokens: most tokens of one chunk. overlap_tokens: most tokens repeated from the chunk
    before.
    """

    size_tokens: int
    overlap_tokens: int


@dataclass(frozen=True, slots=True)
class CollectionSettings:
    """Settings of one collection; None where it follows the service's defaults."""

    chunking: Chunking | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Defaults:
    """What applies to collections that do not set their own."""

    chunking: Chunking
    window: int

    def chunking_of(self, settings: CollectionSettings) -> Chunking:
        """The chunking that applies to a collection."""
        return settings.chunking or self.chunking

    def window_of(self, settings: CollectionSettings) -> int:
        """The window that applies to a collection."""
        return self.window if settings.window is None else settings.window


def checked_name(field: str, name: str) -> str:
    """The name, if it is one a collection may have. Raises InvalidInput."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            field,
            f"{name[:80]!r} is no collection name",
            "use 1 to 63 lower-case letters, digits and hyphens, starting with a letter or digit",
        )
    return name


def checked_chunking(size_field: str, overlap_field: str, size: int, overlap: int) -> Chunking:
    """The chunking, if within its limits. Raises InvalidInput naming the field at fault."""
    if not MIN_CHUNK_TOKENS <= size <= MAX_CHUNK_TOKENS:
        raise InvalidInput(
            size_field,
            f"{size} is out of range",
            f"set {MIN_CHUNK_TOKENS} to {MAX_CHUNK_TOKENS} tokens",
        )
    if not 0 <= 2 * overlap < size:
        raise InvalidInput(
            overlap_field,
            f"{overlap} is not less than half of the {size} tokens of a chunk",
            f"set at most {(size - 1) // 2}",
        )
    return Chunking(size, overlap)


def checked_window(field: str, window: int) -> int:
    """The window, if within its limit. Raises InvalidInput."""
    if not 0 <= window <= MAX_WINDOW:
        raise InvalidInput(
            field, f"{window} is out of range", f"set 0 to {MAX_WINDOW} chunks on each side"
        )
    return window
