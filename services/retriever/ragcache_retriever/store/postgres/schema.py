"""The tables in PostgreSQL, and the check that a database has them."""

from __future__ import annotations

import psycopg
from psycopg.rows import TupleRow

from ragcache_core.errors import InvalidInput
from ragcache_retriever.store.statements import POSTGRES
from ragcache_retriever.store.tables import creation

SCHEMA_VERSION = 6
MIN_PGVECTOR = (0, 8)
"""Earlier versions cannot continue a search of a graph, which stages need."""

_URL = "RAGCACHE_BACKEND_URL"
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('ragcache schema ' || current_schema(), 0))"
_SCHEMA = f"""
CREATE TABLE ragcache_schema (version integer NOT NULL);
{creation(POSTGRES)}
-- Their counters change with each document.
ALTER TABLE collections SET (fillfactor = 50);
ALTER TABLE generations SET (fillfactor = 50);
ALTER TABLE outbox_position SET (fillfactor = 50);
-- Stems of English words, stop words too, as the embedded backend has them.
CREATE TEXT SEARCH DICTIONARY ragcache_stems (TEMPLATE = snowball, LANGUAGE = english);
"""


def vector_table(generation: int) -> str:
    """Return the name of the table of a generation's vectors."""
    return f"vectors_{generation}"


def postings_table(generation: int) -> str:
    """Return the name of the table of a generation's words."""
    return f"postings_{generation}"


def prepare_schema(connection: psycopg.Connection[TupleRow]) -> None:
    """Create the tables if there are none. Several retrievers may do so at once.

    Raises:
        InvalidInput: The database lacks pgvector, or another release has written it.
    """
    with connection.transaction():
        connection.execute(_LOCK)
        _check_pgvector(connection)
        found = connection.execute("SELECT to_regclass('ragcache_schema')::text").fetchone()
        if found is None or found[0] is None:
            connection.execute(_SCHEMA)
            connection.execute("INSERT INTO ragcache_schema VALUES (%s)", (SCHEMA_VERSION,))
            return
        version = connection.execute("SELECT version FROM ragcache_schema").fetchone()
    if version is None or version[0] != SCHEMA_VERSION:
        raise InvalidInput(
            _URL,
            f"the database has schema {version and version[0]},"
            f" this retriever uses {SCHEMA_VERSION}",
            "run the release that wrote it, or name an empty database and ingest again",
        )


def _check_pgvector(connection: psycopg.Connection[TupleRow]) -> None:
    sql = "SELECT extversion FROM pg_extension WHERE extname = 'vector'"
    found = connection.execute(sql).fetchone()
    if found is None:
        try:
            with connection.transaction():
                connection.execute("CREATE EXTENSION vector")
        except psycopg.Error as error:
            raise InvalidInput(
                _URL,
                f"the database has no extension 'vector' ({' '.join(str(error).split())})",
                "install pgvector on its server, and run CREATE EXTENSION vector there",
            ) from error
        found = connection.execute(sql).fetchone()
    assert found is not None
    version = tuple(int(part) for part in str(found[0]).split(".")[:2])
    if version < MIN_PGVECTOR:
        raise InvalidInput(
            _URL,
            f"the database has pgvector {found[0]}",
            "update it to 0.8 or newer, and run ALTER EXTENSION vector UPDATE",
        )
