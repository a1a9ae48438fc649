"""Reads of documents and chunks from PostgreSQL. Any thread calls them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence

import numpy as np
import psycopg

from ragcache_core.retrieval.filters import Filter
from ragcache_retriever.documents.chunking import Chunk
from ragcache_retriever.store.postgres.connections.binary_types import (
    BigintArray,
    rows_of,
    vectors_of,
)
from ragcache_retriever.store.postgres.connections.database import PostgresDatabase, Row
from ragcache_retriever.store.postgres.filters import PostgresFilter
from ragcache_retriever.store.postgres.schema import vector_table
from ragcache_retriever.store.records import (
    Document,
    Neighbourhood,
    Rows,
    StoredChunk,
    StoredDocument,
    Vectors,
)

MAX_LISTING_BYTES = 4 << 20
"""A page of a listing ends early, so that it fits into one message."""

_HOME = "(SELECT row FROM collections WHERE name = %s)"
_SERVING = (
    "(SELECT generations.row FROM generations"
    " WHERE generations.collection = documents.collection AND state = 'serving')"
)
_DOCUMENT = (
    "SELECT id, title, content_type, metadata, content_hash, updated_unix_ms,"
    f" coalesce((SELECT num_chunks FROM prepared WHERE document = documents.row AND"
    f" generation = {_SERVING}), 0),"
    " ARRAY(SELECT generation FROM prepared WHERE document = documents.row)"
)
_AROUND = """
SELECT middle.row, chunks.row, id, title, chunks.ordinal, chunks.text, chunks.heading_path,
    chunks.token_ids, tokenizer, content_hash, updated_unix_ms
FROM chunks AS middle JOIN chunks ON chunks.document = middle.document
    AND chunks.generation = middle.generation
    AND chunks.ordinal BETWEEN middle.ordinal - %s AND middle.ordinal + %s
JOIN documents ON documents.row = middle.document
JOIN prepared ON prepared.document = middle.document AND prepared.generation = middle.generation
WHERE middle.row = ANY(%s) ORDER BY middle.row, chunks.ordinal
"""


class PostgresReads:
    """Queries on documents, chunks and embeddings."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database

    # Documents

    def get(self, collection: str, document_id: str) -> StoredDocument | None:
        """See DocumentStore.get."""
        row = self._database.read_one(
            f"{_DOCUMENT}, text FROM documents JOIN texts ON texts.document = documents.row"
            f" WHERE collection = {_HOME} AND id = %s",
            (collection, document_id),
        )
        return None if row is None else _stored_document(row, row[8])

    def find(self, collection: str, document_id: str) -> StoredDocument | None:
        """See DocumentStore.find."""
        row = self._database.read_one(
            f"{_DOCUMENT} FROM documents WHERE collection = {_HOME} AND id = %s",
            (collection, document_id),
        )
        return None if row is None else _stored_document(row, "")

    def page(
        self, collection: str, after: str, limit: int
    ) -> tuple[list[StoredDocument], str | None]:
        """See DocumentStore.page."""
        rows = self._database.read(
            f"{_DOCUMENT} FROM (SELECT *, sum(octet_length(metadata) + octet_length(title)"
            "  + octet_length(id)) OVER (ORDER BY id) AS num_bytes"
            f"  FROM documents WHERE collection = {_HOME} AND id > %s ORDER BY id LIMIT %s)"
            " AS documents WHERE num_bytes - octet_length(metadata) <= %s ORDER BY id",
            (collection, after, limit + 1, MAX_LISTING_BYTES),
        )
        found: list[StoredDocument] = []
        num_bytes = 0
        for row in rows:
            if len(found) == limit or num_bytes > MAX_LISTING_BYTES:
                return found, found[-1].document.id
            num_bytes += len(row[0]) + len(row[1]) + len(row[3])
            found.append(_stored_document(row, ""))
        return found, None

    def unprepared(self, collection: str, generation: int, after: str, limit: int) -> list[str]:
        """See DocumentStore.unprepared."""
        rows = self._database.read(
            f"SELECT id FROM documents WHERE collection = {_HOME} AND id > %s AND NOT EXISTS"
            " (SELECT 1 FROM prepared WHERE document = documents.row AND generation = %s)"
            " ORDER BY id LIMIT %s",
            (collection, after, generation, limit),
        )
        return [document_id for (document_id,) in rows]

    def report(self, name: str) -> tuple[bytes, int] | None:
        """See DocumentStore.report."""
        row = self._database.read_one(
            "SELECT body, updated_unix_ms FROM reports WHERE name = %s", (name,)
        )
        return None if row is None else (row[0], row[1])

    # Embeddings

    def embedded(
        self, collection: str, document_id: str, generation: int
    ) -> list[tuple[Chunk, Vectors]]:
        """See DocumentStore.embedded."""
        rows = self._rows_of_vectors(
            "SELECT chunks.text, heading_path, vector_send(vector) FROM chunks"
            " JOIN {table} USING (row) JOIN documents ON documents.row = document"
            f" WHERE documents.collection = {_HOME} AND id = %s AND generation = %s"
            " ORDER BY ordinal",
            generation,
            (collection, document_id, generation),
        )
        return [
            (Chunk(text, tuple(json.loads(path))), vectors_of([sent])[0])
            for text, path, sent in rows
        ]

    def vectors_after(self, generation: int, after_row: int, limit: int) -> tuple[Rows, Vectors]:
        """See DocumentStore.vectors_after."""
        return _joined(
            self._rows_of_vectors(
                "SELECT row, vector_send(vector) FROM {table} WHERE row > %s ORDER BY row LIMIT %s",
                generation,
                (after_row, limit),
            )
        )

    def rows(self, generation: int) -> Rows:
        """See DocumentStore.rows."""
        found = self._rows_of_vectors(
            "SELECT array_send(array_agg(row ORDER BY row)) FROM {table}", generation, ()
        )
        return rows_of(found[0][0] if found else None)

    def vectors(self, generation: int, rows: Sequence[int]) -> tuple[Rows, Vectors]:
        """See DocumentStore.vectors."""
        return _joined(
            self._rows_of_vectors(
                "SELECT row, vector_send(vector) FROM {table} WHERE row = ANY(%s) ORDER BY row",
                generation,
                (BigintArray(rows),),
            )
        )

    # Searches

    def allowed_rows(
        self, generation: int, wanted: Filter, cancelled: Callable[[], bool] | None = None
    ) -> Rows:
        """See DocumentStore.allowed_rows."""
        home = self._database.read_one(
            "SELECT collection FROM generations WHERE row = %s", (generation,)
        )
        if home is None:
            return np.empty(0, np.int64)
        sql = PostgresFilter(wanted, home[0])
        with self._database.connection() as connection, connection.cancelled_by(cancelled):
            found = connection.execute(
                "SELECT array_send(array_agg(row ORDER BY row)) FROM chunks"
                " WHERE generation = %s AND document IN"
                " (SELECT documents.row FROM documents"
                f"  WHERE documents.collection = %s AND {sql.condition})",
                (generation, home[0], *sql.parameters),
                binary=True,
            ).fetchone()
        return rows_of(found[0] if found else None)

    def rows_version(self, generation: int) -> int:
        """See DocumentStore.rows_version. It is the last transaction that counted the chunks."""
        found = self._database.read_one(
            "SELECT xmin::text::bigint FROM generations WHERE row = %s", (generation,)
        )
        return -1 if found is None else int(found[0])

    def neighbourhoods(self, rows: Collection[int], window: int) -> dict[int, Neighbourhood]:
        """See DocumentStore.neighbourhoods."""
        around: dict[int, list[StoredChunk]] = {}
        if rows:
            wanted = BigintArray(list(rows))
            for row in self._database.read(_AROUND, (window, window, wanted)):
                around.setdefault(row[0], []).append(_stored_chunk(row[1:]))
        found = {}
        for middle, chunks in around.items():
            i = next(i for i, chunk in enumerate(chunks) if chunk.row == middle)
            found[middle] = Neighbourhood(chunks[i], tuple(chunks[:i]), tuple(chunks[i + 1 :]))
        return found

    def positions(self, rows: Collection[int]) -> dict[int, tuple[str, int]]:
        """See DocumentStore.positions."""
        found = self._database.read(
            "SELECT chunks.row, id, ordinal FROM chunks JOIN documents"
            " ON documents.row = chunks.document WHERE chunks.row = ANY(%s)",
            (BigintArray(list(rows)),),
        )
        return {row: (document_id, ordinal) for row, document_id, ordinal in found}

    def _rows_of_vectors(
        self, sql: str, generation: int, parameters: Sequence[object]
    ) -> list[Row]:
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


def _stored_chunk(row: Row) -> StoredChunk:
    chunk_row, document_id, title, ordinal, text, heading_path = row[:6]
    token_ids, tokenizer, content_hash, updated_unix_ms = row[6:]
    return StoredChunk(
        chunk_row,
        document_id,
        title,
        ordinal,
        text,
        tuple(json.loads(heading_path)),
        token_ids,
        tokenizer,
        content_hash,
        updated_unix_ms,
    )


def _stored_document(row: Row, text: str) -> StoredDocument:
    document_id, title, content_type, metadata, content_hash, updated_unix_ms, num_chunks = row[:7]
    document = Document(document_id, title, text, content_type, json.loads(metadata))
    return StoredDocument(
        document, content_hash, num_chunks, updated_unix_ms, frozenset(map(int, row[7]))
    )
