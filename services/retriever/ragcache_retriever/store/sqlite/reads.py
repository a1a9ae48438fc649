"""Reads of documents and chunks from SQLite. Any thread calls them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Sequence

import numpy as np

from ragcache_core.retrieval.filters import Filter
from ragcache_retriever.documents.chunking import Chunk
from ragcache_retriever.store.records import (
    Document,
    Neighbourhood,
    Rows,
    StoredChunk,
    StoredDocument,
    Vectors,
)
from ragcache_retriever.store.sqlite.database import Database, Row
from ragcache_retriever.store.sqlite.filters import FilterSql

MAX_LISTING_BYTES = 4 << 20
"""A page of a listing ends early, so that it fits into one message."""

_HOME = "(SELECT row FROM collections WHERE name = ?)"
_SERVING = (
    "(SELECT generations.row FROM generations"
    " WHERE generations.collection = documents.collection AND state = 'serving')"
)
_DOCUMENT = (
    "SELECT id, title, content_type, metadata, content_hash, updated_unix_ms,"
    f" coalesce((SELECT num_chunks FROM prepared WHERE document = documents.row AND"
    f" generation = {_SERVING}), 0),"
    " (SELECT group_concat(generation) FROM prepared WHERE document = documents.row)"
)
_CHUNK = (
    "SELECT chunks.row, id, title, chunks.ordinal, chunks.text, chunks.heading_path,"
    " chunks.token_ids, tokenizer,"
    " content_hash, updated_unix_ms FROM chunks JOIN documents ON documents.row = chunks.document"
    " JOIN prepared ON prepared.document = chunks.document"
    " AND prepared.generation = chunks.generation"
)


class DocumentReads:
    """Queries on documents, chunks and embeddings."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # Documents

    def get(self, collection: str, document_id: str) -> StoredDocument | None:
        """See DocumentStore.get."""
        row = self._database.read_one(
            f"{_DOCUMENT}, text FROM documents JOIN texts ON texts.document = documents.row"
            f" WHERE collection = {_HOME} AND id = ?",
            (collection, document_id),
        )
        return None if row is None else _stored_document(row, row[8])

    def find(self, collection: str, document_id: str) -> StoredDocument | None:
        """See DocumentStore.find."""
        row = self._database.read_one(
            f"{_DOCUMENT} FROM documents WHERE collection = {_HOME} AND id = ?",
            (collection, document_id),
        )
        return None if row is None else _stored_document(row, "")

    def page(
        self, collection: str, after: str, limit: int
    ) -> tuple[list[StoredDocument], str | None]:
        """See DocumentStore.page."""
        found: list[StoredDocument] = []
        num_bytes = 0
        with contextlib.closing(
            self._database.iterate(
                f"{_DOCUMENT} FROM documents WHERE collection = {_HOME} AND id > ?"
                " ORDER BY id LIMIT ?",
                (collection, after, limit + 1),
            )
        ) as rows:
            for row in rows:
                if len(found) == limit or num_bytes > MAX_LISTING_BYTES:
                    return found, found[-1].document.id
                num_bytes += len(row[0]) + len(row[1]) + len(row[3])
                found.append(_stored_document(row, ""))
        return found, None

    def unprepared(self, collection: str, generation: int, after: str, limit: int) -> list[str]:
        """See DocumentStore.unprepared."""
        rows = self._database.read(
            f"SELECT id FROM documents WHERE collection = {_HOME} AND id > ? AND NOT EXISTS"
            " (SELECT 1 FROM prepared WHERE document = documents.row AND generation = ?)"
            " ORDER BY id LIMIT ?",
            (collection, after, generation, limit),
        )
        return [document_id for (document_id,) in rows]

    def report(self, name: str) -> tuple[bytes, int] | None:
        """See DocumentStore.report."""
        row = self._database.read_one(
            "SELECT body, updated_unix_ms FROM reports WHERE name = ?", (name,)
        )
        return None if row is None else (row[0], row[1])

    # Embeddings

    def embedded(
        self, collection: str, document_id: str, generation: int
    ) -> list[tuple[Chunk, Vectors]]:
        """See DocumentStore.embedded."""
        rows = self._database.read(
            "SELECT text, heading_path, vector FROM chunks JOIN embeddings USING (row)"
            f" WHERE document = (SELECT row FROM documents WHERE collection = {_HOME} AND id = ?)"
            " AND chunks.generation = ? ORDER BY ordinal",
            (collection, document_id, generation),
        )
        return [
            (Chunk(text, tuple(json.loads(path))), np.frombuffer(vector, "<f4"))
            for text, path, vector in rows
        ]

    def vectors_after(self, generation: int, after_row: int, limit: int) -> tuple[Rows, Vectors]:
        """See DocumentStore.vectors_after."""
        return _joined(
            self._database.read(
                "SELECT row, vector FROM embeddings WHERE generation = ? AND row > ?"
                " ORDER BY row LIMIT ?",
                (generation, after_row, limit),
            )
        )

    def rows(self, generation: int) -> Rows:
        """See DocumentStore.rows."""
        found = self._database.read(
            "SELECT row FROM embeddings WHERE generation = ? ORDER BY row", (generation,)
        )
        return _rows(found)

    def vectors(self, generation: int, rows: Sequence[int]) -> tuple[Rows, Vectors]:
        """See DocumentStore.vectors."""
        return _joined(
            self._database.read(
                "SELECT row, vector FROM embeddings WHERE generation = ?"
                " AND row IN (SELECT value FROM json_each(?)) ORDER BY row",
                (generation, json.dumps([int(row) for row in rows])),
            )
        )

    # Searches

    def allowed_rows(
        self, generation: int, wanted: Filter, cancelled: Callable[[], bool] | None = None
    ) -> Rows:
        """See DocumentStore.allowed_rows."""
        home = self._database.read_one(
            "SELECT collection FROM generations WHERE row = ?", (generation,)
        )
        if home is None:
            return np.empty(0, np.int64)
        sql = FilterSql(wanted, home[0])
        # One text of all rows: a million tuples would take a second, and Python's lock meanwhile.
        [(joined,)] = self._database.iterate(
            "SELECT group_concat(row) FROM chunks WHERE generation = ? AND document IN"
            " (SELECT documents.row FROM documents"
            f"  WHERE documents.collection = ? AND {sql.condition})",
            (generation, home[0], *sql.parameters),
            cancelled=cancelled,
        )
        return np.sort(np.fromstring(joined or "", np.int64, sep=","))

    def neighbourhoods(self, rows: Collection[int], window: int) -> dict[int, Neighbourhood]:
        """See DocumentStore.neighbourhoods."""
        if not rows:
            return {}
        with self._database.snapshot():
            return self._neighbourhoods(rows, window)

    def _neighbourhoods(self, rows: Collection[int], window: int) -> dict[int, Neighbourhood]:
        found = {}
        for row in rows:
            around = [
                _stored_chunk(one)
                for one in self._database.read(
                    f"{_CHUNK} JOIN chunks AS middle ON middle.row = ?"
                    " WHERE chunks.document = middle.document"
                    " AND chunks.generation = middle.generation AND chunks.ordinal"
                    " BETWEEN middle.ordinal - ? AND middle.ordinal + ? ORDER BY chunks.ordinal",
                    (row, window, window),
                )
            ]
            middle = next((i for i, chunk in enumerate(around) if chunk.row == row), None)
            if middle is not None:
                before, after = tuple(around[:middle]), tuple(around[middle + 1 :])
                found[row] = Neighbourhood(around[middle], before, after)
        return found

    def positions(self, rows: Collection[int]) -> dict[int, tuple[str, int]]:
        """See DocumentStore.positions."""
        found = self._database.read(
            "SELECT chunks.row, id, ordinal FROM chunks JOIN documents"
            " ON documents.row = chunks.document"
            " WHERE chunks.row IN (SELECT value FROM json_each(?))",
            (json.dumps([int(row) for row in rows]),),
        )
        return {row: (document_id, ordinal) for row, document_id, ordinal in found}


def _rows(found: list[Row]) -> Rows:
    return np.fromiter((row for (row,) in found), np.int64, len(found))


def _joined(found: list[Row]) -> tuple[Rows, Vectors]:
    if not found:
        return np.empty(0, np.int64), np.empty((0, 0), np.float32)
    rows = np.array([row for row, _ in found], np.int64)
    joined = b"".join(vector for _, vector in found)
    return rows, np.frombuffer(joined, "<f4").reshape(len(found), -1)


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
    prepared = frozenset(map(int, row[7].split(","))) if row[7] else frozenset()
    document = Document(document_id, title, text, content_type, json.loads(metadata))
    return StoredDocument(document, content_hash, num_chunks, updated_unix_ms, prepared)
