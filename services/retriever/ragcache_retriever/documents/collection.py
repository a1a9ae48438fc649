"""Settings of a collection: how its documents are split, and how they are searched."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.fusion import DEFAULT_LEXICAL_WEIGHT
from ragcache_core.retrieval.index_kinds import IndexKind

DEFAULT_COLLECTION = "default"
"""This collection always exists, so that a first document needs no setup."""

MIN_CHUNK_TOKENS = 16
MAX_CHUNK_TOKENS = 4096
MAX_WINDOW = 8

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


@dataclass(frozen=True, slots=True)
class Chunking:
    """How documents are split, in tokens of the serving model.

    ``size_tokens`` is the most tokens of one chunk, ``overlap_tokens`` the most tokens repeated
    from the chunk before. ``labels`` tells whether the tokens of a chunk begin with its label
    (``passage_label``), which is beside its size: so the texts of chunks do not depend on titles.
    """

    size_tokens: int
    overlap_tokens: int
    labels: bool = True


@dataclass(frozen=True, slots=True)
class CollectionSettings:
    """Settings of one collection. None: the service's default.

    Attributes:
        max_documents: Most documents; 0: no limit.
        max_text_bytes: Most bytes of their texts; 0: no limit.
        lexical_weight: Share of the lexical leg in the fused scores of a search, in [0, 1].
        labels: Whether prompts name the document and the section of each chunk.
    """

    chunking: Chunking | None = None
    window: int | None = None
    index: IndexKind | None = None
    max_documents: int = 0
    max_text_bytes: int = 0
    lexical_weight: float = DEFAULT_LEXICAL_WEIGHT
    labels: bool = True


@dataclass(frozen=True, slots=True)
class CollectionDefaults:
    """Settings of collections that do not set their own."""

    chunking: Chunking
    window: int
    index: IndexKind = IndexKind.AUTO

    def chunking_of(self, settings: CollectionSettings) -> Chunking:
        """Return the chunking of a collection."""
        return replace(settings.chunking or self.chunking, labels=settings.labels)

    def window_of(self, settings: CollectionSettings) -> int:
        """Return the window of a collection."""
        return self.window if settings.window is None else settings.window

    def index_of(self, settings: CollectionSettings) -> IndexKind:
        """Return the kind of a collection's index."""
        return settings.index or self.index


def checked_name(field: str, name: str) -> str:
    """Return a collection's name. Raises InvalidInput if it is not valid."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            field,
            f"{name[:80]!r} is not a valid collection name",
            "use 1 to 63 lower-case letters, digits and hyphens, starting with a letter or digit",
        )
    return name


def checked_chunking(size_field: str, overlap_field: str, size: int, overlap: int) -> Chunking:
    """Return a chunking. Raises InvalidInput, naming the field, for one out of range."""
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
    """Return a window. Raises InvalidInput for one out of range."""
    if not 0 <= window <= MAX_WINDOW:
        raise InvalidInput(
            field, f"{window} is out of range", f"set 0 to {MAX_WINDOW} chunks on each side"
        )
    return window


def checked_lexical_weight(field: str, weight: float) -> float:
    """Return the weight of the lexical leg. Raises InvalidInput for one out of range."""
    if not 0.0 <= weight <= 1.0:
        raise InvalidInput(field, f"{weight:g} is out of range", "set 0 to 1")
    return weight
