"""The schema of the SQLite file, and the check that a file has it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.lexical.terms import IDENTIFIER_MARK, IDENTIFIER_SYMBOLS
from ragcache_retriever.store.statements import SQLITE
from ragcache_retriever.store.tables import creation

SCHEMA_VERSION = 7
APPLICATION_ID = 0x52414743  # "RAGC"
FILE_NAME = "documents.sqlite3"
TERM_TOKENIZER = f"porter ascii tokenchars '{IDENTIFIER_SYMBOLS}{IDENTIFIER_MARK}'"
"""How FTS5 divides terms with spaces between them: at the spaces. It stems words."""

SCHEMA = f"""
{creation(SQLITE)}
CREATE TABLE embeddings (
    row INTEGER PRIMARY KEY,     -- of the chunk
    generation INTEGER NOT NULL,
    vector BLOB NOT NULL         -- float32, little-endian, of length 1
);
CREATE INDEX embeddings_by_generation ON embeddings (generation);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""


def lexical_table(generation: int) -> str:
    """Return the name of the full-text table of a generation."""
    return f"lexical_{generation}"


def create_lexical_table(generation: int) -> str:
    """Return the SQL that creates the full-text table of a generation.

    It holds the terms of chunks, and no texts: they are in ``chunks``, with the same rows.
    """
    return (
        f"CREATE VIRTUAL TABLE {lexical_table(generation)} USING"
        f" fts5(title, headings, text, content='', tokenize=\"{TERM_TOKENIZER}\")"
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
