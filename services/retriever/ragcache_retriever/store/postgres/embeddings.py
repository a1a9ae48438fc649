"""Embeddings in tables of pgvector, one for each generation."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import psycopg
from typing_extensions import override

from ragcache_retriever.documents.chunking import Chunk
from ragcache_retriever.store.database import Row
from ragcache_retriever.store.generation_tables import EmbeddingTables
from ragcache_retriever.store.postgres.binary_types import (
    BigintArray,
    rows_of,
    vector_bytes,
    vectors_of,
)
from ragcache_retriever.store.postgres.database import (
    APPLICATION_NAME,
    PostgresDatabase,
)
from ragcache_retriever.store.postgres.schema import vector_table
from ragcache_retriever.store.records import Rows, Vectors

_MAX_INLINE_DIMENSION = 1900
"""Largest vectors that fit into a page of 8 KiB. Larger ones are stored beside their row."""

_ABANDON_BUILDS = """
SELECT pg_cancel_backend(pid) FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE relation = to_regclass(%s) AND mode = 'ShareUpdateExclusiveLock' AND pid != pg_backend_pid()
    AND application_name = %s AND usename = current_user
"""


class PostgresEmbeddings(EmbeddingTables):
    """The vectors of generations. See EmbeddingTables."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database

    @override
    def create(self, generation: int, dimension: int) -> None:
        table = vector_table(generation)
        self._database.execute(
            f"CREATE TABLE {table} (row bigint PRIMARY KEY, vector vector({dimension}) NOT NULL)"
        )
        if dimension <= _MAX_INLINE_DIMENSION:
            self._database.execute(f"ALTER TABLE {table} ALTER COLUMN vector SET STORAGE PLAIN")

    @override
    def add(self, generation: int, rows: Sequence[int], vectors: Vectors) -> None:
        self._database.copy(
            f"{vector_table(generation)} (row, vector)",
            ("int8", "bytea"),
            ((row, vector_bytes(vector)) for row, vector in zip(rows, vectors, strict=True)),
        )

    @override
    def remove(self, generation: int, rows: Sequence[int]) -> None:
        table = vector_table(generation)
        if self._database.has_table(table):
            self._database.execute(f"DELETE FROM {table} WHERE row = ANY(%s)", (BigintArray(rows),))

    def detach(self, generation: int) -> None:
        """Remove the table. The server removes its files at once, of any size.

        An index that a retriever builds meanwhile is abandoned. Its build waits for this
        transaction, and this one would wait for the build.
        """
        table = vector_table(generation)
        self._database.query(_ABANDON_BUILDS, (table, APPLICATION_NAME))
        self._database.execute(f"DROP TABLE IF EXISTS {table}")

    @override
    def of_document(
        self, collection: str, document_id: str, generation: int
    ) -> list[tuple[Chunk, Vectors]]:
        rows = self._read(
            "SELECT chunks.text, heading_path, vector_send(vector) FROM chunks"
            " JOIN {table} USING (row) JOIN documents ON documents.row = document"
            " JOIN collections ON collections.row = documents.collection"
            " WHERE collections.name = %s AND id = %s AND generation = %s ORDER BY ordinal",
            generation,
            (collection, document_id, generation),
        )
        return [
            (Chunk(text, tuple(json.loads(path))), vectors_of([sent])[0])
            for text, path, sent in rows
        ]

    @override
    def after(self, generation: int, after_row: int, limit: int) -> tuple[Rows, Vectors]:
        return _joined(
            self._read(
                "SELECT row, vector_send(vector) FROM {table} WHERE row > %s ORDER BY row LIMIT %s",
                generation,
                (after_row, limit),
            )
        )

    @override
    def rows(self, generation: int) -> Rows:
        found = self._read(
            "SELECT array_send(array_agg(row ORDER BY row)) FROM {table}", generation, ()
        )
        return rows_of(found[0][0] if found else None)

    @override
    def of_rows(self, generation: int, rows: Sequence[int]) -> tuple[Rows, Vectors]:
        return _joined(
            self._read(
                "SELECT row, vector_send(vector) FROM {table} WHERE row = ANY(%s) ORDER BY row",
                generation,
                (BigintArray(rows),),
            )
        )

    def _read(self, sql: str, generation: int, parameters: Sequence[object]) -> list[Row]:
        """Return the rows of a query on a generation's vectors; none if it is removed."""
        with self._database.connection() as connection:
            try:
                return connection.execute(
                    sql.format(table=vector_table(generation)), parameters, binary=True
                ).fetchall()
            except psycopg.errors.UndefinedTable:
                return []


def _joined(found: list[Row]) -> tuple[Rows, Vectors]:
    rows = np.fromiter((row for row, _ in found), np.int64, len(found))
    return rows, vectors_of([sent for _, sent in found])
