"""Who may use KV that was computed after other documents and other texts.

The KV of a chunk carries the influence of all tokens before it. A variant that serves a prompt with
other tokens before the chunk therefore brings in texts that the prompt does not have. It may do so
only where the caller may read these documents, and where no other key has written these texts.

Source: HijackKV (arXiv 2607.19957).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from ragcache_core.identity.keys import KEY_BYTES, ChunkKey
from ragcache_core.identity.variant import Influence
from ragcache_core.retrieval.filters import Filter

MAX_CACHED_READERS: Final = 1024


@dataclass(frozen=True, slots=True)
class Reader:
    """What a caller may read, as a plan says it to an engine.

    Attributes:
        rights: Digest of the key's collections and filter: KEY_BYTES. Equal for keys that may read
            the same documents.
        key: Digest of the key's name: KEY_BYTES. Texts of prompts are those of a key.
        reads_all: Whether the key has neither collections nor a filter.
    """

    rights: bytes
    key: bytes
    reads_all: bool

    def __post_init__(self) -> None:
        if len(self.rights) != KEY_BYTES or len(self.key) != KEY_BYTES:
            raise ValueError(f"the digests of a reader have {KEY_BYTES} bytes each")


def _digest(person: bytes, text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES, person=person).digest()


@functools.lru_cache(MAX_CACHED_READERS)
def reader_of(name: str, collections: tuple[str, ...], wanted: Filter | None) -> Reader:
    """Return the reader of a key.

    Args:
        name: Of the key.
        collections: Patterns of the collections that it may name; empty: all.
        wanted: Documents that its searches consider; None: all.
    """
    patterns = tuple(sorted(set(collections)))
    rights = _digest(b"ragcache-rights", repr((patterns, wanted)))
    reads_all = not patterns and wanted is None
    return Reader(rights, _digest(b"ragcache-writer", name), reads_all)


EVERYONE: Final = reader_of("anyone", (), None)
"""The reader of a platform without keys."""

NO_READER: Final = Reader(bytes(KEY_BYTES), bytes(KEY_BYTES), reads_all=False)
"""A reader without rights, which may use only what the prompt itself has. Its digests equal none,
also not its own in an influence."""


def may_use(
    reader: Reader,
    present: Collection[ChunkKey],
    influence: Influence,
    prefix_chunks: Sequence[ChunkKey],
    *,
    is_exact: bool,
) -> bool:
    """Whether a prompt may use a variant that was computed after another prefix.

    Args:
        reader: Who asks.
        present: Chunks of the prompt. Who asks may read these, and has written or accepted them.
        influence: Of the variant.
        prefix_chunks: Chunks before the variant, first to last.
        is_exact: Whether the variant was computed in full, after nothing but these chunks. If not,
            it may depend on more than they have.
    """
    head, documents = prefix_chunks[: influence.num_head], prefix_chunks[influence.num_head :]
    may_read = (
        reader.reads_all
        or (influence.rights == reader.rights and reader.rights != NO_READER.rights)
        or (is_exact and all(chunk in present for chunk in documents))
    )
    is_own = (
        not influence.writer
        or (influence.writer == reader.key and reader.key != NO_READER.key)
        or (is_exact and all(chunk in present for chunk in head))
    )
    return may_read and is_own
