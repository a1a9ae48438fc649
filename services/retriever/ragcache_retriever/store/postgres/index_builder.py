"""Builds the indexes of pgvector in the background, while searches and writes go on."""

from __future__ import annotations

import logging
import math

import psycopg

from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.store.postgres.database import Connection, PostgresDatabase
from ragcache_retriever.store.postgres.schema import vector_table

log = logging.getLogger(__name__)

AUTO_GRAPH_ROWS = 10_000
"""Vectors above which AUTO searches a graph. Below, a scan takes some milliseconds."""
MAX_INDEXED_DIMENSION = 2000
"""pgvector indexes no longer vectors."""
GRAPH_LINKS, GRAPH_BUILD_BEAM = 16, 64
"""m and ef_construction of a graph: pgvector's defaults."""
BUILD_MEMORY = "256MB"

_VALID = (
    "SELECT relname FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid"
    " WHERE indrelid = to_regclass(%s) AND indisvalid AND relname = ANY(%s)"
)


def index_name(generation: int, kind: IndexKind) -> str:
    """Return the name of an index of pgvector."""
    return f"{vector_table(generation)}_{kind.value}"


def wanted_kind(kind: IndexKind, num_rows: int, dimension: int) -> IndexKind:
    """Return the kind to build, never AUTO."""
    if dimension > MAX_INDEXED_DIMENSION or not num_rows:
        return IndexKind.FLAT
    if kind is IndexKind.AUTO:
        return IndexKind.HNSW if num_rows >= AUTO_GRAPH_ROWS else IndexKind.FLAT
    return kind


def built_kind(connection: Connection, generation: int) -> IndexKind:
    """Return the kind of the index that a search can use."""
    names = {index_name(generation, kind): kind for kind in (IndexKind.HNSW, IndexKind.IVF)}
    found = connection.execute(_VALID, (vector_table(generation), list(names))).fetchall()
    return min((names[name] for (name,) in found), default=IndexKind.FLAT)


def build(database: PostgresDatabase, generation: int, dimension: int, kind: IndexKind) -> None:
    """Build the index of a kind and drop others. Another retriever that builds it goes on alone."""
    with database.errors(), database.new_connection() as connection:
        table = vector_table(generation)
        lock = "SELECT pg_try_advisory_lock(hashtextextended(current_schema() || %s, 0))"
        locked = connection.execute(lock, (table,)).fetchone()
        if locked is None or not locked[0]:
            return
        try:
            [(num_rows,)] = connection.execute(f"SELECT count(*) FROM {table}").fetchall()
            wanted = wanted_kind(kind, num_rows, dimension)
            if wanted is not built_kind(connection, generation):
                _replace(connection, generation, wanted, num_rows)
        except psycopg.errors.UndefinedTable:
            log.info("index: dropped meanwhile generation=%d", generation)


def _replace(connection: Connection, generation: int, wanted: IndexKind, num_rows: int) -> None:
    table, name = vector_table(generation), index_name(generation, wanted)
    if wanted is not IndexKind.FLAT:
        connection.execute(f"SET maintenance_work_mem = '{BUILD_MEMORY}'")
        # What an interrupted build has left cannot be used.
        connection.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")
        method = f"USING hnsw (vector vector_ip_ops) WITH (m = {GRAPH_LINKS},"
        method += f" ef_construction = {GRAPH_BUILD_BEAM})"
        if wanted is IndexKind.IVF:
            num_cells = max(1, math.isqrt(num_rows))
            method = f"USING ivfflat (vector vector_ip_ops) WITH (lists = {num_cells})"
        connection.execute(f"CREATE INDEX CONCURRENTLY {name} ON {table} {method}")
        log.info("index: built generation=%d kind=%s rows=%d", generation, wanted.value, num_rows)
    for other in {IndexKind.HNSW, IndexKind.IVF} - {wanted}:
        connection.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {index_name(generation, other)}")
