"""What a search has read of its candidates. Later stages mostly have the same ones."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence

import numpy as np

from ragcache_core.retrieval.fusion import Position
from ragcache_core.retrieval.lexical.folding import comparable
from ragcache_retriever.ranking.rerankers import CandidateText
from ragcache_retriever.ranking.search import SearchedChunks
from ragcache_retriever.store.records import StoredChunk, Vectors

_VANISHED = StoredChunk(-1, "", "", 0, "", ())


class CandidatePool:
    """Texts and embeddings of the candidates of one search. Each is read once."""

    def __init__(self, chunks: SearchedChunks, dimension: int) -> None:
        self._chunks = chunks
        self._vectors: dict[int, Vectors] = {}
        self._no_vector = np.zeros(dimension, np.float32)
        self._stored: dict[int, StoredChunk] = {}
        self._passages: dict[int, Hashable] = {}
        self._names: dict[int, Hashable] = {}
        self._positions: dict[int, Position] = {}

    def vectors(self, rows: Sequence[int]) -> Vectors:
        """Return embeddings, shape (len(rows), dimension). A row of zeros: there is none."""
        new = [row for row in rows if row not in self._vectors]
        if new:
            self._vectors |= dict.fromkeys(new, self._no_vector)
            present, vectors = self._chunks.store.embeddings.of_rows(self._chunks.generation, new)
            self._vectors |= zip(present.tolist(), vectors, strict=True)
        found = [self._vectors[row] for row in rows]
        return np.stack(found) if found else np.empty((0, len(self._no_vector)), np.float32)

    def texts(self, rows: Sequence[int]) -> list[CandidateText]:
        """Return the texts of rows, read at once. A chunk that has vanished has an empty one."""
        self.read(rows)
        return [_text_of(self._stored[row]) for row in rows]

    def read(self, rows: Sequence[int]) -> None:
        """Read the chunks of rows at once."""
        new = [row for row in rows if row not in self._stored]
        if new:
            self._stored |= dict.fromkeys(new, _VANISHED)
            found = self._chunks.store.reads.neighbourhoods(new, 0)
            self._stored |= {row: near.chunk for row, near in found.items()}

    def positions(self, rows: Sequence[int]) -> list[Position]:
        """Return document id and ordinal of rows."""
        new = [row for row in rows if row not in self._positions]
        if new:
            self._positions |= dict.fromkeys(new, ("", 0))
            self._positions |= self._chunks.store.reads.positions(new)
        return [self._positions[row] for row in rows]

    def passage(self, row: int) -> Hashable:
        """Return what copies of a row, which has been read, have in common."""
        if row not in self._passages:
            chunk = self._stored[row]
            parts = chunk.text, *chunk.heading_path
            self._passages[row] = tuple(map(comparable, parts)) if chunk.text.strip() else row
        return self._passages[row]

    def document_name(self, row: int) -> Hashable:
        """Return what names the document of a row, which has been read.

        It is the title. A title that is the document's id says nothing, so documents without a
        title have the same name if their whole texts are copies.
        """
        if row not in self._names:
            chunk = self._stored[row]
            if chunk.title == chunk.document_id:
                # A digest, because a search may compare hundreds of documents of megabytes.
                text = self._chunks.store.reads.document_text(row) or ""
                self._names[row] = hashlib.sha256(comparable(text).encode()).digest()
            else:
                self._names[row] = comparable(chunk.title)
        return self._names[row]

    def version(self, row: int) -> int:
        """Return the time of the last change of the document of a row, which has been read."""
        return self._stored[row].updated_unix_ms


def _text_of(chunk: StoredChunk) -> CandidateText:
    return CandidateText(" ".join((chunk.title, *chunk.heading_path)), chunk.text)
