"""What a search has read of its candidates. Later stages mostly have the same ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ragcache_core.retrieval.near_duplicates import Shingles, shingles_of
from ragcache_retriever.ranking.rerankers import CandidateText
from ragcache_retriever.ranking.search import SearchedChunks
from ragcache_retriever.store.records import Vectors

_VANISHED = CandidateText("", "")


class CandidatePool:
    """Texts and embeddings of the candidates of one search. Each is read once."""

    def __init__(self, chunks: SearchedChunks, dimension: int) -> None:
        self._chunks = chunks
        self._vectors: dict[int, Vectors] = {}
        self._no_vector = np.zeros(dimension, np.float32)
        self._texts: dict[int, CandidateText] = {}
        self._versions: dict[int, int] = {}
        self._shingles: dict[int, Shingles] = {}

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
        new = [row for row in rows if row not in self._texts]
        if new:
            self._texts |= dict.fromkeys(new, _VANISHED)
            for row, found in self._chunks.store.reads.neighbourhoods(new, 0).items():
                chunk = found.chunk
                heading = " ".join((chunk.title, *chunk.heading_path))
                self._texts[row] = CandidateText(heading, chunk.text)
                self._versions[row] = chunk.updated_unix_ms
        return [self._texts[row] for row in rows]

    def shingles(self, row: int) -> Shingles:
        """Return the shingles of a row's text, without its headings."""
        if row not in self._shingles:
            self._shingles[row] = shingles_of(self.texts([row])[0].text)
        return self._shingles[row]

    def version(self, row: int) -> int:
        """Return the time of the last change of a row's document, whose text has been read."""
        return self._versions.get(row, 0)
