"""The schema of the SQLite file, and the check that a file has it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from ragcache_core.errors import InvalidInput

SCHEMA_VERSION = 4
APPLICATION_ID = 0x52414743  # "RAGC"
FILE_NAME = "documents.sqlite3"
WORD_TOKENIZER = "porter unicode61 remove_diacritics 2"
"""How FTS5 divides texts and questions into words."""

SCHEMA = f"""
CREATE TABLE collections (
    row INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    size_tokens INTEGER,     -- NULL: the service's default
    overlap_tokens INTEGER,
    window INTEGER,
    index_kind TEXT,
    max_documents INTEGER NOT NULL,
    max_text_bytes INTEGER NOT NULL,
    lexical_weight REAL NOT NULL,
    num_documents INTEGER NOT NULL DEFAULT 0,
    text_bytes INTEGER NOT NULL DEFAULT 0,
    is_deleting INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE generations (
    row INTEGER PRIMARY KEY AUTOINCREMENT,
    collection INTEGER NOT NULL REFERENCES collections (row),
    state TEXT NOT NULL,     -- serving, building, retired
    splitter TEXT NOT NULL,  -- from here on: see Recipe
    size_tokens INTEGER NOT NULL,
    overlap_tokens INTEGER NOT NULL,
    tokenizer TEXT NOT NULL,
    embedder TEXT NOT NULL,
    dimension INTEGER NOT NULL,
    num_documents INTEGER NOT NULL DEFAULT 0,
    num_chunks INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX generations_by_collection ON generations (collection);
CREATE TABLE documents (
    row INTEGER PRIMARY KEY AUTOINCREMENT,
    collection INTEGER NOT NULL REFERENCES collections (row),
    id TEXT NOT NULL,
    title TEXT NOT NULL,
    content_type INTEGER NOT NULL,
    metadata TEXT NOT NULL,  -- JSON object of strings
    content_hash TEXT NOT NULL,
    text_bytes INTEGER NOT NULL,
    updated_unix_ms INTEGER NOT NULL,
    UNIQUE (collection, id)
);
CREATE TABLE texts (         -- by itself, so that listings read no text
    document INTEGER PRIMARY KEY REFERENCES documents (row) ON DELETE CASCADE,
    text TEXT NOT NULL
);
CREATE TABLE document_fields (
    document INTEGER NOT NULL REFERENCES documents (row) ON DELETE CASCADE,
    collection INTEGER NOT NULL,
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    number REAL,             -- NULL: the value spells no number
    PRIMARY KEY (document, name)
) WITHOUT ROWID;
CREATE INDEX fields_by_value ON document_fields (collection, name, value);
CREATE INDEX fields_by_number ON document_fields (collection, name, number)
    WHERE number IS NOT NULL;
CREATE TABLE prepared (      -- documents that have their chunks in a generation
    document INTEGER NOT NULL REFERENCES documents (row) ON DELETE CASCADE,
    generation INTEGER NOT NULL REFERENCES generations (row),
    num_chunks INTEGER NOT NULL,
    tokenizer TEXT NOT NULL, -- of digests and token ids
    PRIMARY KEY (document, generation)
) WITHOUT ROWID;
CREATE INDEX prepared_by_generation ON prepared (generation);
CREATE TABLE chunks (
    row INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused, because it names the chunk in the index
    generation INTEGER NOT NULL REFERENCES generations (row),
    document INTEGER NOT NULL REFERENCES documents (row),
    ordinal INTEGER NOT NULL,
    token_digest BLOB NOT NULL,  -- the gateway computes the chunk's key from it
    heading_path TEXT NOT NULL,  -- JSON array of strings
    text TEXT NOT NULL,
    token_ids BLOB NOT NULL,     -- uint32, little-endian
    UNIQUE (document, generation, ordinal)
);
CREATE INDEX chunks_by_digest ON chunks (token_digest, generation);
CREATE INDEX chunks_by_generation ON chunks (generation);
CREATE TABLE embeddings (
    row INTEGER PRIMARY KEY,     -- of the chunk
    generation INTEGER NOT NULL,
    vector BLOB NOT NULL         -- float32, little-endian, of length 1
);
CREATE INDEX embeddings_by_generation ON embeddings (generation);
CREATE TABLE reports (
    name TEXT PRIMARY KEY,
    body BLOB NOT NULL,
    updated_unix_ms INTEGER NOT NULL
);
CREATE TABLE outbox (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    id BLOB NOT NULL UNIQUE,
    collection TEXT NOT NULL,
    document TEXT NOT NULL,
    names_document INTEGER NOT NULL,
    everything INTEGER NOT NULL DEFAULT 0,
    token_digests BLOB NOT NULL,
    removed_unix_ms INTEGER NOT NULL,
    claimed_until_ms INTEGER NOT NULL,
    acknowledged_unix_ms INTEGER NOT NULL DEFAULT 0,
    complete INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX outbox_pending ON outbox (claimed_until_ms) WHERE complete = 0;
CREATE INDEX outbox_acknowledged ON outbox (acknowledged_unix_ms) WHERE complete = 0;
CREATE INDEX outbox_complete ON outbox (removed_unix_ms) WHERE complete = 1;
CREATE INDEX outbox_by_document ON outbox (collection, document);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""


def lexical_table(generation: int) -> str:
    """Return the name of the full-text table of a generation."""
    return f"lexical_{generation}"


def create_lexical_table(generation: int) -> str:
    """Return the SQL that creates the full-text table of a generation.

    It holds no texts of its own: they are in ``chunks``, with the same rows.
    """
    return (
        f"CREATE VIRTUAL TABLE {lexical_table(generation)} USING"
        f" fts5(title, headings, text, content='', tokenize='{WORD_TOKENIZER}')"
    )


def check_schema(connection: sqlite3.Connection, path: Path) -> bool:
    """Return whether the file has the schema. False: it is empty.

    Raises:
        InvalidInput: Another program or another release wrote it.
    """
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if num_tables == 0:
        return False
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise InvalidInput(
            "RAGCACHE_DATA_DIR",
            f"{path} was not written by a retriever",
            "name another folder",
        )
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version != SCHEMA_VERSION:
        raise InvalidInput(
            "RAGCACHE_DATA_DIR",
            f"{path} has schema {version}, this retriever reads {SCHEMA_VERSION}",
            "run the release that wrote it, or name an empty folder and ingest again",
        )
    return True
