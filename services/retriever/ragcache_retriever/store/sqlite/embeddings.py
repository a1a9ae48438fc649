"""Embeddings in one table of SQLite."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from ragcache_retriever.documents.chunking import Chunk
from ragcache_retriever.store.database import Row
from ragcache_retriever.store.generation_tables import EmbeddingTables
from ragcache_retriever.store.records import Rows, Vectors
from ragcache_retriever.store.sqlite.database import SqliteDatabase


class SqliteEmbeddings(EmbeddingTables):
    """The vectors of all generations. See EmbeddingTables."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database

    def create(self, generation: int, dimension: int) -> None:
        """Do nothing: the table is there."""

    @override
    def add(self, generation: int, rows: Sequence[int], vectors: Vectors) -> None:
        self._database.execute_rows(
            "INSERT INTO embeddings (row, generation, vector) VALUES (?, ?, ?)",
            [
                (row, generation, vector.astype("<f4").tobytes())
                for row, vector in zip(rows, vectors, strict=True)
            ],
        )

    @override
    def remove(self, generation: int, rows: Sequence[int]) -> None:
        self._database.execute_rows(
            "DELETE FROM embeddings WHERE row = ?", [(row,) for row in rows]
        )

    def detach(self, generation: int) -> None:
        """Do nothing: an index searches copies of the vectors."""

    @override
    def of_document(
        self, collection: str, document_id: str, generation: int
    ) -> list[tuple[Chunk, Vectors]]:
        rows = self._database.read(
            "SELECT text, heading_path, vector FROM chunks JOIN embeddings USING (row)"
            " WHERE document = (SELECT row FROM documents WHERE id = ?"
            "  AND collection = (SELECT row FROM collections WHERE name = ?))"
            " AND chunks.generation = ? ORDER BY ordinal",
            (document_id, collection, generation),
        )
        return [
            (Chunk(text, tuple(json.loads(path))), np.frombuffer(vector, "<f4"))
            for text, path, vector in rows
        ]

    @override
    def after(self, generation: int, after_row: int, limit: int) -> tuple[Rows, Vectors]:
        return _joined(
            self._database.read(
                "SELECT row, vector FROM embeddings WHERE generation = ? AND row > ?"
                " ORDER BY row LIMIT ?",
                (generation, after_row, limit),
            )
        )

    @override
    def rows(self, generation: int) -> Rows:
        found = self._database.read(
            "SELECT row FROM embeddings WHERE generation = ? ORDER BY row", (generation,)
        )
        return np.fromiter((row for (row,) in found), np.int64, len(found))

    @override
    def of_rows(self, generation: int, rows: Sequence[int]) -> tuple[Rows, Vectors]:
        return _joined(
            self._database.read(
                "SELECT row, vector FROM embeddings WHERE generation = ?"
                " AND row IN (SELECT value FROM json_each(?)) ORDER BY row",
                (generation, self._database.row_list(rows)),
            )
        )


def _joined(found: list[Row]) -> tuple[Rows, Vectors]:
    if not found:
        return np.empty(0, np.int64), np.empty((0, 0), np.float32)
    rows = np.array([row for row, _ in found], np.int64)
    joined = b"".join(vector for _, vector in found)
    return rows, np.frombuffer(joined, "<f4").reshape(len(found), -1)
