"""What a search has read of its candidates. Later stages mostly have the same ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ragcache_core.retrieval.near_duplicates import Shingles, shingles_of
from ragcache_retriever.ranking.candidate_text import CandidateText
from ragcache_retriever.search.vector_index import Vectors
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import Rows


class CandidatePool:
    """Texts and embeddings of the candidates of one search. Each is read once."""

    def __init__(self, store: DocumentStore, generation: int, dimension: int) -> None:
        self._store = store
        self._generation = generation
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
            stored = self._store.embeddings.of_rows(self._generation, new)
            self._vectors |= zip(*_listed(stored), strict=True)
        found = [self._vectors[row] for row in rows]
        return np.stack(found) if found else np.empty((0, len(self._no_vector)), np.float32)

    def read_texts(self, rows: Sequence[int]) -> None:
        """Read the texts of rows at once. A chunk that has vanished has an empty one."""
        new = [row for row in rows if row not in self._texts]
        if not new:
            return
        found = self._store.reads.neighbourhoods(new, 0)
        for row in new:
            chunk = found[row].chunk if row in found else None
            self._versions[row] = 0 if chunk is None else chunk.updated_unix_ms
            self._texts[row] = (
                CandidateText("", "")
                if chunk is None
                else CandidateText(" ".join((chunk.title, *chunk.heading_path)), chunk.text)
            )

    def texts(self, rows: Sequence[int]) -> list[CandidateText]:
        """Return the texts of rows."""
        self.read_texts(rows)
        return [self._texts[row] for row in rows]

    def shingles(self, row: int) -> Shingles:
        """Return the shingles of a row's text, without its headings."""
        if row not in self._shingles:
            self._shingles[row] = shingles_of(self.texts([row])[0].text)
        return self._shingles[row]

    def version(self, row: int) -> int:
        """Return the time of the last change of a row's document. Its text has been read."""
        return self._versions[row]


def _listed(found: tuple[Rows, Vectors]) -> tuple[list[int], Vectors]:
    rows, vectors = found
    return rows.tolist(), vectors
