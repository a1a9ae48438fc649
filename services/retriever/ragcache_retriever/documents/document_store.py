"""Stores documents, their chunks and embeddings in SQLite, the source of truth.

There are one writer thread and any number of readers. Each change is one transaction, which is on
disk when it commits (WAL with synchronous=FULL). A process killed at any moment therefore loses no
acknowledged change.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_retriever.documents.chunking import Chunk
from ragcache_retriever.documents.collection import Chunking, CollectionSettings
from ragcache_retriever.documents.outbox import (
    OUTBOX_SCHEMA,
    Outbox,
    OutboxDelete,
    Removal,
    last_sequence,
    removals_after,
)

SCHEMA_VERSION = 2
FILE_NAME = "documents.sqlite3"
BUSY_TIMEOUT_S = 10.0
LOAD_ROWS = 4096
"""Chunks that are read at a time to build an index."""
MAX_LISTING_BYTES = 4 << 20
"""A page of a listing ends early, so that it fits into one message."""

_APPLICATION_ID = 0x52414743  # "RAGC"
_SCHEMA = f"""
CREATE TABLE collections (
    row INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    size_tokens INTEGER,     -- NULL: the service's default
    overlap_tokens INTEGER,
    window INTEGER
);
CREATE TABLE documents (
    row INTEGER PRIMARY KEY,
    collection INTEGER NOT NULL REFERENCES collections (row),
    id TEXT NOT NULL,
    title TEXT NOT NULL,
    text TEXT NOT NULL,
    content_type INTEGER NOT NULL,
    metadata TEXT NOT NULL,      -- JSON object of strings
    content_hash TEXT NOT NULL,
    chunker TEXT NOT NULL,       -- these three: see Recipe
    embedder TEXT NOT NULL,
    num_chunks INTEGER NOT NULL,
    updated_unix_ms INTEGER NOT NULL,
    UNIQUE (collection, id)
);
CREATE TABLE chunks (
    row INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused, because it names the chunk in the index
    document INTEGER NOT NULL REFERENCES documents (row) ON DELETE CASCADE,
    collection INTEGER NOT NULL,
    ordinal INTEGER NOT NULL,
    text TEXT NOT NULL,
    token_digest BLOB NOT NULL,  -- the gateway computes the chunk's key from it
    heading_path TEXT NOT NULL,  -- JSON array of strings
    embedding BLOB NOT NULL,     -- float32, little-endian, of length 1
    UNIQUE (document, ordinal)
);
CREATE INDEX chunks_by_digest ON chunks (collection, token_digest);
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""

_REPORTS_SCHEMA = """
CREATE TABLE IF NOT EXISTS reports (
    name TEXT PRIMARY KEY,
    body BLOB NOT NULL,
    updated_unix_ms INTEGER NOT NULL
);
"""
"""A table that files of this schema version may lack, like that of the outbox."""

Vectors = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Document:
    """A document as its owner sent it.

    ``title`` is never empty. ``content_type`` is a number of the proto's enum.
    """

    id: str
    title: str
    text: str
    content_type: int
    metadata: Mapping[str, str]

    def content_hash(self) -> str:
        """Return a hash that is equal for documents with equal content."""
        parts = [self.title, self.text, self.content_type, sorted(self.metadata.items())]
        content = json.dumps(parts, ensure_ascii=False).encode()
        return hashlib.blake2b(content, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a document became chunks, digests and embeddings. Another recipe makes it stale.

    ``chunker`` names splitter, chunking and tokenizer, ``embedder`` the embedding model.
    """

    chunker: str
    embedder: str


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document and its state in the store. In listings its text is empty.

    ``updated_unix_ms`` is the time of the last change of its content. A rebuild by another recipe
    does not change the content.
    """

    document: Document
    content_hash: str
    recipe: Recipe
    num_chunks: int
    updated_unix_ms: int


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk of a document. ``ordinal`` is its index in the document."""

    row: int
    document_id: str
    title: str
    ordinal: int
    text: str
    heading_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """A chunk and its neighbours, in document order."""

    chunk: StoredChunk
    before: tuple[StoredChunk, ...]
    after: tuple[StoredChunk, ...]


@dataclass(frozen=True, slots=True)
class ChunkChange:
    """The change of a collection's chunks in one transaction.

    ``removed`` and ``added`` are rows, ``added`` in document order. ``deletes`` are what the change
    has put into the outbox. If the caller sends them, they include the document's earlier ones that
    no shard has acknowledged. ``sequence`` is that of the last removal.
    """

    removed: tuple[int, ...]
    added: tuple[int, ...]
    deletes: tuple[OutboxDelete, ...]
    sequence: int


class DocumentStore:
    """The documents of one data folder, which no other process may use.

    One thread at a time calls the methods that change documents, inside ``transaction``. Any thread
    may call the others.

    Raises:
        InvalidInput: The folder cannot be used.
        Unavailable: A write failed, for example on a full disk.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._lock_file = _locked(folder)
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._connections_lock = threading.Lock()
        try:
            self._writer = self._connect()
            self._prepare()
        except sqlite3.Error as error:
            self.close()
            raise InvalidInput(
                "RAGCACHE_DATA_DIR",
                f"{self._path} cannot be opened: {error}",
                "check its permissions, or restore it from a backup",
            ) from error
        except InvalidInput:
            self.close()
            raise
        self.outbox = Outbox(self._writer)

    def close(self) -> None:
        """Close all connections and unlock the folder."""
        with self._connections_lock:
            for connection in self._connections:
                connection.close()
            self._connections.clear()
        os.close(self._lock_file)

    def _connect(self) -> sqlite3.Connection:
        # Each thread has its own connection. Only close() uses those of other threads, which have
        # ended by then.
        connection = sqlite3.connect(
            self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        with self._connections_lock:
            self._connections.append(connection)
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    def _prepare(self) -> None:
        version = self._writer.execute("PRAGMA user_version").fetchone()[0]
        application = self._writer.execute("PRAGMA application_id").fetchone()[0]
        empty = self._writer.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        if not empty and application != _APPLICATION_ID:
            raise InvalidInput(
                "RAGCACHE_DATA_DIR",
                f"{self._path} was not written by a retriever",
                "name another folder",
            )
        if not empty and version != SCHEMA_VERSION:
            raise InvalidInput(
                "RAGCACHE_DATA_DIR",
                f"{self._path} has schema {version}, this retriever reads {SCHEMA_VERSION}",
                "run the release that wrote it, or name an empty folder and ingest again",
            )
        self._writer.execute("PRAGMA journal_mode = WAL")
        self._writer.execute("PRAGMA synchronous = FULL")
        if empty:
            self._writer.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
        self._writer.executescript(f"BEGIN IMMEDIATE; {_REPORTS_SCHEMA} {OUTBOX_SCHEMA} COMMIT;")

    @property
    def _reader(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._connect()
            connection.execute("PRAGMA query_only = ON")
            self._local.connection = connection
        return connection

    # Changes

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Undo all changes made inside, unless ``commit`` is called."""
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise Unavailable("retriever", f"documents cannot be written: {error}") from error

    def commit(self) -> None:
        """Make the transaction's changes durable and visible. An error undoes all of them."""
        self._writer.execute("COMMIT")

    def put_collection(self, name: str, settings: CollectionSettings) -> None:
        """Create a collection or change its settings."""
        chunking = settings.chunking
        self._writer.execute(
            "INSERT INTO collections (name, size_tokens, overlap_tokens, window)"
            " VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET"
            " size_tokens = excluded.size_tokens, overlap_tokens = excluded.overlap_tokens,"
            " window = excluded.window",
            (
                name,
                chunking and chunking.size_tokens,
                chunking and chunking.overlap_tokens,
                settings.window,
            ),
        )

    def replace(
        self,
        collection: str,
        stored: StoredDocument,
        chunks: Sequence[Chunk],
        digests: Sequence[bytes],
        embeddings: Vectors,
        *,
        now_ms: int,
        claim: bool,
    ) -> ChunkChange:
        """Insert a document, or replace the one with its id.

        Args:
            digests: Token digest of each chunk.
            embeddings: Embedding of each chunk, shape (len(chunks), dimension).
            now_ms: Unix time.
            claim: Whether the caller sends the document's deletes.
        """
        document = stored.document
        home = self._collection_row(self._writer, collection)
        is_split_again = self._has_other_chunker(home, document.id, stored.recipe.chunker)
        removed, old_digests = self._remove_chunks(home, document.id)
        (row,) = self._writer.execute(
            "INSERT INTO documents (collection, id, title, text, content_type, metadata,"
            " content_hash, chunker, embedder, num_chunks, updated_unix_ms)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (collection, id) DO UPDATE SET title = excluded.title,"
            " text = excluded.text, content_type = excluded.content_type,"
            " metadata = excluded.metadata, content_hash = excluded.content_hash,"
            " chunker = excluded.chunker, embedder = excluded.embedder,"
            " num_chunks = excluded.num_chunks, updated_unix_ms = excluded.updated_unix_ms"
            " RETURNING row",
            (
                home,
                document.id,
                document.title,
                document.text,
                document.content_type,
                json.dumps(dict(document.metadata), ensure_ascii=False, sort_keys=True),
                stored.content_hash,
                stored.recipe.chunker,
                stored.recipe.embedder,
                stored.num_chunks,
                stored.updated_unix_ms,
            ),
        ).fetchone()
        added = []
        for ordinal, (chunk, digest, embedding) in enumerate(
            zip(chunks, digests, embeddings, strict=True)
        ):
            cursor = self._writer.execute(
                "INSERT INTO chunks (document, collection, ordinal, text, token_digest,"
                " heading_path, embedding) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    row,
                    home,
                    ordinal,
                    chunk.text,
                    digest,
                    json.dumps(chunk.heading_path, ensure_ascii=False),
                    embedding.astype("<f4").tobytes(),
                ),
            )
            assert cursor.lastrowid is not None
            added.append(cursor.lastrowid)
        unused = self._unused(home, old_digests)
        deletes = self.outbox.add(
            collection,
            document.id,
            unused,
            # Another tokenizer means another KV space, in which these digests name nothing.
            names_document=is_split_again and bool(unused),
            now_ms=now_ms,
        )
        if claim:
            deletes = self._claim_deletes(collection, document.id, now_ms)
        return ChunkChange(removed, tuple(added), deletes, last_sequence(self._writer))

    def delete(self, collection: str, document_id: str, now_ms: int) -> ChunkChange | None:
        """Delete a document. Return None if it does not exist."""
        home = self._collection_row(self._writer, collection)
        removed, old_digests = self._remove_chunks(home, document_id)
        cursor = self._writer.execute(
            "DELETE FROM documents WHERE collection = ? AND id = ?", (home, document_id)
        )
        if cursor.rowcount == 0:
            return None
        unused = self._unused(home, old_digests)
        self.outbox.add(collection, document_id, unused, names_document=True, now_ms=now_ms)
        deletes = self._claim_deletes(collection, document_id, now_ms)
        return ChunkChange(removed, (), deletes, last_sequence(self._writer))

    def put_report(self, name: str, body: bytes, updated_unix_ms: int) -> None:
        """Store a report in place of the one of its name."""
        self._writer.execute(
            "INSERT OR REPLACE INTO reports (name, body, updated_unix_ms) VALUES (?, ?, ?)",
            (name, body, updated_unix_ms),
        )

    def _claim_deletes(
        self, collection: str, document_id: str, now_ms: int
    ) -> tuple[OutboxDelete, ...]:
        """Claim the deletes of a change, and earlier ones that no shard has acknowledged."""
        return self.outbox.claim_of(collection, document_id, now_ms, is_repeated=False)

    def _has_other_chunker(self, home: int, document_id: str, chunker: str) -> bool:
        found = self._writer.execute(
            "SELECT 1 FROM documents WHERE collection = ? AND id = ? AND chunker != ?",
            (home, document_id, chunker),
        ).fetchone()
        return found is not None

    def _remove_chunks(self, home: int, document_id: str) -> tuple[tuple[int, ...], list[bytes]]:
        found = self._writer.execute(
            "DELETE FROM chunks WHERE document ="
            " (SELECT row FROM documents WHERE collection = ? AND id = ?)"
            " RETURNING row, ordinal, token_digest",
            (home, document_id),
        ).fetchall()
        found.sort(key=lambda chunk: int(chunk[1]))
        return tuple(row for row, _, _ in found), [digest for _, _, digest in found]

    def _unused(self, home: int, digests: Sequence[bytes]) -> tuple[bytes, ...]:
        return tuple(
            digest
            for digest in dict.fromkeys(digests)
            if self._writer.execute(
                "SELECT 1 FROM chunks WHERE collection = ? AND token_digest = ? LIMIT 1",
                (home, digest),
            ).fetchone()
            is None
        )

    # Reads

    def collections(self) -> dict[str, CollectionSettings]:
        """Return the settings of all collections, by name."""
        return {
            name: CollectionSettings(None if size is None else Chunking(size, overlap), window)
            for name, size, overlap, window in self._reader.execute(
                "SELECT name, size_tokens, overlap_tokens, window FROM collections ORDER BY name"
            )
        }

    def counts(self, collection: str) -> tuple[int, int]:
        """Return the numbers of documents and of chunks."""
        documents, chunks = self._reader.execute(
            "SELECT count(*), coalesce(sum(num_chunks), 0) FROM documents WHERE collection ="
            " (SELECT row FROM collections WHERE name = ?)",
            (collection,),
        ).fetchone()
        return documents, chunks

    def get(self, collection: str, document_id: str) -> StoredDocument | None:
        """Return a document with its text, or None."""
        row = self._reader.execute(
            "SELECT id, title, text, content_type, metadata, content_hash, chunker,"
            " embedder, num_chunks, updated_unix_ms FROM documents WHERE collection ="
            " (SELECT row FROM collections WHERE name = ?) AND id = ?",
            (collection, document_id),
        ).fetchone()
        return None if row is None else _stored_document(row)

    def page(
        self, collection: str, after: str, limit: int
    ) -> tuple[list[StoredDocument], str | None]:
        """Return up to ``limit`` documents after an id, sorted by id and without their text.

        Returns:
            The documents, and the id after which the next page begins, or None.
        """
        found: list[StoredDocument] = []
        num_bytes = 0
        with contextlib.closing(
            self._reader.execute(
                "SELECT id, title, '', content_type, metadata, content_hash, chunker,"
                " embedder, num_chunks, updated_unix_ms FROM documents"
                " WHERE collection = (SELECT row FROM collections WHERE name = ?) AND id > ?"
                " ORDER BY id LIMIT ?",
                (collection, after, limit + 1),
            )
        ) as rows:
            for row in rows:
                if len(found) == limit or num_bytes > MAX_LISTING_BYTES:
                    return found, found[-1].document.id
                num_bytes += len(row[0]) + len(row[1]) + len(row[4])
                found.append(_stored_document(row))
        return found, None

    def stale(self, collection: str, recipe: Recipe) -> list[str]:
        """Return the sorted ids of documents that another recipe prepared."""
        rows = self._reader.execute(
            "SELECT id FROM documents WHERE collection ="
            " (SELECT row FROM collections WHERE name = ?)"
            " AND (chunker != ? OR embedder != ?) ORDER BY id",
            (collection, recipe.chunker, recipe.embedder),
        )
        return [document_id for (document_id,) in rows]

    def report(self, name: str) -> tuple[bytes, int] | None:
        """Return a report and the Unix milliseconds of its last change, or None."""
        row = self._reader.execute(
            "SELECT body, updated_unix_ms FROM reports WHERE name = ?", (name,)
        ).fetchone()
        return None if row is None else (row[0], row[1])

    def removals(self, after: int, limit: int) -> tuple[list[Removal], int]:
        """Return the removals after a sequence, oldest first, and the sequence of the last one."""
        # In this order: a removal in between is then returned or has a greater sequence.
        last = last_sequence(self._reader)
        return removals_after(self._reader, after, limit), last

    def positions(self, rows: Collection[int]) -> dict[int, tuple[str, int]]:
        """Return document id and ordinal of chunks, by row. Rows that do not exist are left out."""
        found = {}
        for row in rows:
            position = self._reader.execute(
                "SELECT id, ordinal FROM chunks JOIN documents"
                " ON documents.row = chunks.document WHERE chunks.row = ?",
                (row,),
            ).fetchone()
            if position is not None:
                found[row] = (position[0], position[1])
        return found

    def embedded(self, collection: str, document_id: str) -> list[tuple[Chunk, Vectors]]:
        """Return the chunks of a document with their embeddings, in order."""
        rows = self._reader.execute(
            "SELECT text, heading_path, embedding FROM chunks WHERE document ="
            " (SELECT row FROM documents WHERE collection ="
            "  (SELECT row FROM collections WHERE name = ?) AND id = ?) ORDER BY ordinal",
            (collection, document_id),
        )
        return [
            (Chunk(text, tuple(json.loads(path))), np.frombuffer(embedding, "<f4"))
            for text, path, embedding in rows
        ]

    def embeddings(self, collection: str, embedder: str) -> tuple[Rows, Vectors]:
        """Return rows and embeddings of all chunks that an embedder embedded, sorted by row.

        Returns:
            Shapes (n,) and (n, dimension). The dimension is 0 if n is.
        """
        rows: list[int] = []
        parts: list[Vectors] = []
        cursor = self._reader.execute(
            "SELECT chunks.row, embedding FROM chunks JOIN documents"
            " ON documents.row = chunks.document WHERE chunks.collection ="
            " (SELECT row FROM collections WHERE name = ?) AND embedder = ? ORDER BY chunks.row",
            (collection, embedder),
        )
        while found := cursor.fetchmany(LOAD_ROWS):
            rows.extend(row for row, _ in found)
            joined = b"".join(embedding for _, embedding in found)
            parts.append(np.frombuffer(joined, "<f4").reshape(len(found), -1))
        vectors = np.concatenate(parts) if parts else np.empty((0, 0), np.float32)
        return np.array(rows, np.int64), vectors

    def neighbourhoods(self, rows: Collection[int], window: int) -> dict[int, Neighbourhood]:
        """Return chunks by row, each with up to ``window`` neighbours on each side.

        Rows that no longer exist are left out.
        """
        found = {}
        for row in rows:
            position = self._reader.execute(
                "SELECT document, ordinal FROM chunks WHERE row = ?", (row,)
            ).fetchone()
            if position is None:
                continue
            document, ordinal = position
            around = [
                _stored_chunk(found_row)
                for found_row in self._reader.execute(
                    "SELECT chunks.row, id, title, ordinal, chunks.text, heading_path"
                    " FROM chunks JOIN documents ON documents.row = chunks.document"
                    " WHERE document = ? AND ordinal BETWEEN ? AND ? ORDER BY ordinal",
                    (document, ordinal - window, ordinal + window),
                )
            ]
            middle = next((i for i, chunk in enumerate(around) if chunk.row == row), None)
            if middle is not None:
                before, after = tuple(around[:middle]), tuple(around[middle + 1 :])
                found[row] = Neighbourhood(around[middle], before, after)
        return found

    def _collection_row(self, connection: sqlite3.Connection, name: str) -> int:
        row: int = connection.execute(
            "SELECT row FROM collections WHERE name = ?", (name,)
        ).fetchone()[0]
        return row


def _locked(folder: Path) -> int:
    """Lock the folder until the returned descriptor is closed or the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(folder / "retriever.lock", flags, 0o600)
    except OSError as error:
        raise InvalidInput(
            "RAGCACHE_DATA_DIR", f"{folder} cannot be written: {error}", "name a writable folder"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise InvalidInput(
            "RAGCACHE_DATA_DIR",
            f"{folder} is in use by another retriever",
            "stop that one, or name another folder",
        ) from error
    return descriptor


def _stored_chunk(row: tuple[Any, ...]) -> StoredChunk:
    chunk_row, document_id, title, ordinal, text, heading_path = row
    return StoredChunk(
        chunk_row, document_id, title, ordinal, text, tuple(json.loads(heading_path))
    )


def _stored_document(row: tuple[Any, ...]) -> StoredDocument:
    document_id, title, text, content_type, metadata, content_hash = row[:6]
    chunker, embedder, num_chunks, updated_unix_ms = row[6:]
    document = Document(document_id, title, text, content_type, json.loads(metadata))
    recipe = Recipe(chunker, embedder)
    return StoredDocument(document, content_hash, recipe, num_chunks, updated_unix_ms)
