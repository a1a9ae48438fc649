"""Copies what can be read of a damaged database into a new one.

Documents and their texts are what counts. Chunks, embeddings and words follow from them: a document
whose chunks are not complete is prepared again in the background.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragcache_core.errors import Unavailable
from ragcache_core.retrieval.filters import number_of
from ragcache_retriever.store.sqlite.files.backup import (
    INDEXES_FOLDER,
    check_copy,
    remove_database,
    sync_folder,
)
from ragcache_retriever.store.sqlite.files.everything import delete_everything
from ragcache_retriever.store.sqlite.schema import FILE_NAME, SCHEMA, create_lexical_table

log = logging.getLogger(__name__)

DAMAGED_NAME = "documents.sqlite3.damaged"
_RECOVERED_NAME = "recovered.part"
_RECOVERY_INTERVAL_S = 3600.0
_ROWS_AT_ONCE = 256
_MAX_ROW = (1 << 63) - 1

_TABLES = {
    "collections": "row",
    "generations": "row",
    "documents": "row",
    "texts": "document",
    "chunks": "row",
    "embeddings": "row",
    "reports": "rowid",
    "outbox": "sequence",
}
"""Tables that are copied, with the column of their row number."""
_NEEDED = ("collections", "documents", "texts")


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What a recovery has found.

    Attributes:
        num_documents: Documents with their texts.
        num_incomplete: Those of them that have to be prepared again.
    """

    num_documents: int
    num_lost_documents: int
    num_incomplete: int


class RecoveryFailed(Unavailable):
    """Too little of the database can be read. A backup is needed."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            "retriever",
            f"its documents are damaged and cannot be recovered: {problem}; run"
            " 'ragcache restore FILE' with a backup",
            retry_after_s=30.0,
        )


def recover(folder: Path) -> RecoveryReport:
    """Replace a damaged database by what can be read of it. The damaged file is moved aside.

    Raises:
        RecoveryFailed: Its documents cannot be read, or the disk lacks space. Nothing has changed.
    """
    damaged, recovered = folder / FILE_NAME, folder / _RECOVERED_NAME
    free_bytes = shutil.disk_usage(folder).free
    if not damaged.exists() or free_bytes < damaged.stat().st_size:
        raise RecoveryFailed(f"the recovery needs as much disk space; {free_bytes} bytes are free")
    remove_database(recovered)
    try:
        report = _salvage(damaged, recovered)
        if report.num_lost_documents:
            # KV of the lost texts is stored under keys that only they would give.
            delete_everything(recovered, damaged)
        with contextlib.closing(sqlite3.connect(recovered)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")
        check_copy(recovered)
    except (sqlite3.Error, OSError) as error:
        remove_database(recovered)
        raise RecoveryFailed(str(error)) from error
    remove_database(folder / DAMAGED_NAME)
    os.replace(damaged, folder / DAMAGED_NAME)
    remove_database(damaged)
    shutil.rmtree(folder / INDEXES_FOLDER, ignore_errors=True)
    os.replace(recovered, damaged)
    sync_folder(folder)
    log.warning(
        "document store: recovered documents=%d lost=%d incomplete=%d damaged_file=%s",
        report.num_documents,
        report.num_lost_documents,
        report.num_incomplete,
        folder / DAMAGED_NAME,
    )
    return report


def discard(folder: Path) -> None:
    """Move a damaged database aside, because another replica has a whole one to copy."""
    damaged = folder / FILE_NAME
    remove_database(folder / DAMAGED_NAME)
    if damaged.exists():
        os.replace(damaged, folder / DAMAGED_NAME)
    remove_database(damaged)
    shutil.rmtree(folder / INDEXES_FOLDER, ignore_errors=True)
    sync_folder(folder)
    log.warning("document store: discarded damaged_file=%s", folder / DAMAGED_NAME)


def has_recovered_lately(folder: Path) -> bool:
    """Whether a recovery ended within the last hour. Another one would hardly find more."""
    try:
        recovered_s = (folder / DAMAGED_NAME).stat().st_ctime
    except OSError:
        return False
    return time.time() - recovered_s < _RECOVERY_INTERVAL_S


def _salvage(damaged: Path, recovered: Path) -> RecoveryReport:
    with (
        contextlib.closing(sqlite3.connect(damaged, isolation_level=None)) as source,
        contextlib.closing(sqlite3.connect(recovered, isolation_level=None)) as target,
    ):
        target.executescript(f"PRAGMA synchronous = OFF; BEGIN; {SCHEMA}")
        for table, row_column in _TABLES.items():
            _copy_table(source, target, table, row_column)
        _copy_sequences(source, target)
        _copy_small_table(source, target, "prepared")
        _copy_small_table(source, target, "state")
        report = _make_consistent(target)
        target.execute("UPDATE state SET sequence = sequence + 1, epoch = epoch + 1")
        target.execute("COMMIT")
    return report


def _copy_table(
    source: sqlite3.Connection, target: sqlite3.Connection, table: str, row_column: str
) -> None:
    try:
        columns = [row[1] for row in source.execute(f"PRAGMA table_info({table})")]
    except sqlite3.DatabaseError as error:
        raise RecoveryFailed(f"{table}: {error}") from error
    if not columns:
        raise RecoveryFailed(f"table {table} is missing")
    selected = ", ".join([row_column, *columns])
    insert = (
        f"INSERT OR IGNORE INTO {table} ({', '.join(columns)})"
        f" VALUES ({', '.join('?' * len(columns))})"
    )
    num_rows = 0
    for rows in _readable(source, table, row_column, selected):
        target.executemany(insert, [row[1:] for row in rows])
        num_rows += len(rows)
    if not num_rows and table in _NEEDED and _has_rows(source, table):
        raise RecoveryFailed(f"no row of table {table} can be read")


def _has_rows(source: sqlite3.Connection, table: str) -> bool:
    """Whether a table seems to have rows. A table that cannot be read does."""
    try:
        return source.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() is not None
    except sqlite3.DatabaseError:
        return True


def _readable(
    source: sqlite3.Connection, table: str, row_column: str, columns: str
) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the rows of a table that can be read, in order, and skip what cannot."""
    after, limit = -1, _ROWS_AT_ONCE
    skip = 0
    while after < _MAX_ROW:
        try:
            rows = source.execute(
                f"SELECT {columns} FROM {table} WHERE {row_column} > ?"
                f" ORDER BY {row_column} LIMIT ?",
                (after, limit),
            ).fetchall()
        except sqlite3.DatabaseError:
            if limit > 1:
                limit = 1  # find the first row that cannot be read
                continue
            skip = max(1, 2 * skip)
            after = min(after + skip, _MAX_ROW)
            continue
        if skip > 1:
            # The skip has grown, so rows before this one may be readable: go back half of it.
            after, skip = after - skip // 2, 0
            continue
        if not rows:
            return
        yield rows
        after, skip, limit = int(rows[-1][0]), 0, min(2 * limit, _ROWS_AT_ONCE)


def _copy_sequences(source: sqlite3.Connection, target: sqlite3.Connection) -> None:
    """Let row numbers go on after those that were used."""
    with contextlib.suppress(sqlite3.DatabaseError):
        for name, last in source.execute("SELECT name, seq FROM sqlite_sequence").fetchall():
            target.execute(
                "UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = ?", (last, name)
            )


def _copy_small_table(source: sqlite3.Connection, target: sqlite3.Connection, table: str) -> None:
    """Copy a table as a whole, or not at all."""
    with contextlib.suppress(sqlite3.DatabaseError):
        rows = source.execute(f"SELECT * FROM {table}").fetchall()
        if rows:
            placeholders = ", ".join("?" * len(rows[0]))
            target.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({placeholders})", rows)


def _make_consistent(target: sqlite3.Connection) -> RecoveryReport:
    """Remove documents without a text, and chunks that are not all of their document's."""
    (num_expected,) = target.execute(
        "SELECT coalesce(sum(num_documents), 0) FROM collections"
    ).fetchone()
    target.execute(
        "DELETE FROM documents WHERE row NOT IN (SELECT document FROM texts)"
        " OR collection NOT IN (SELECT row FROM collections)"
    )
    target.execute("DELETE FROM texts WHERE document NOT IN (SELECT row FROM documents)")
    target.execute(
        "DELETE FROM prepared WHERE document NOT IN (SELECT row FROM documents)"
        " OR generation NOT IN (SELECT row FROM generations)"
        " OR num_chunks != (SELECT count(*) FROM chunks WHERE chunks.document = prepared.document"
        "  AND chunks.generation = prepared.generation)"
        " OR (SELECT count(*) FROM chunks JOIN embeddings USING (row)"
        "  WHERE chunks.document = prepared.document"
        "  AND chunks.generation = prepared.generation) != num_chunks"
    )
    target.execute(
        "DELETE FROM chunks WHERE NOT EXISTS (SELECT 1 FROM prepared"
        " WHERE prepared.document = chunks.document AND prepared.generation = chunks.generation)"
    )
    target.execute("DELETE FROM embeddings WHERE row NOT IN (SELECT row FROM chunks)")
    _count(target)
    _derive_fields(target)
    _derive_words(target)
    (num_documents,) = target.execute("SELECT count(*) FROM documents").fetchone()
    (num_incomplete,) = target.execute(
        "SELECT count(*) FROM documents WHERE row NOT IN (SELECT document FROM prepared)"
    ).fetchone()
    return RecoveryReport(num_documents, max(0, num_expected - num_documents), num_incomplete)


def _count(target: sqlite3.Connection) -> None:
    target.execute(
        "UPDATE collections SET num_documents ="
        " (SELECT count(*) FROM documents WHERE collection = collections.row),"
        " text_bytes = (SELECT coalesce(sum(documents.text_bytes), 0) FROM documents"
        "  WHERE collection = collections.row)"
    )
    target.execute(
        "UPDATE generations SET num_documents ="
        " (SELECT count(*) FROM prepared WHERE generation = generations.row),"
        " num_chunks = (SELECT coalesce(sum(prepared.num_chunks), 0) FROM prepared"
        "  WHERE generation = generations.row)"
    )


def _derive_fields(target: sqlite3.Connection) -> None:
    rows = target.execute("SELECT row, collection, metadata FROM documents").fetchall()
    for row, collection, metadata in rows:
        target.executemany(
            "INSERT INTO document_fields (document, collection, name, value, number)"
            " VALUES (?, ?, ?, ?, ?)",
            [
                (row, collection, name, value, number_of(value))
                for name, value in sorted(json.loads(metadata).items())
            ],
        )


def _derive_words(target: sqlite3.Connection) -> None:
    for (generation,) in target.execute(
        "SELECT row FROM generations WHERE state != 'retired'"
    ).fetchall():
        target.execute(create_lexical_table(generation))
        target.execute(
            f"INSERT INTO lexical_{generation} (rowid, title, headings, text)"
            " SELECT chunks.row, title, heading_path, text FROM chunks JOIN documents"
            " ON documents.row = chunks.document WHERE generation = ? ORDER BY chunks.row",
            (generation,),
        )
