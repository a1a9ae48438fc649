"""Connections to the SQLite file: one that writes in transactions, and many that read.

Each change is one transaction, which is on disk when it commits (WAL with synchronous=FULL). A
process killed at any moment therefore loses no acknowledged change.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias
from weakref import WeakSet

import numpy as np
from sqlalchemy import Table
from typing_extensions import override

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_retriever.store.database import Database, Parameters, Row, Sql
from ragcache_retriever.store.records import DiskUse, Rows
from ragcache_retriever.store.sqlite.files.backup import (
    forget_indexes,
    install_backup,
    is_damage,
)
from ragcache_retriever.store.sqlite.files.damage import (
    MARKER_NAME,
    DocumentsDamaged,
    refuse_damage,
    set_aside,
)
from ragcache_retriever.store.sqlite.files.folder_lock import lock_folder
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from ragcache_retriever.store.sqlite.schema import FILE_NAME, SCHEMA, check_schema
from ragcache_retriever.store.statements import SQLITE

log = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 10.0
MAX_IDLE_LOG_BYTES = 16 << 20
"""Size to which SQLite's log is cut after its content is in the file."""

Value: TypeAlias = int | float | str | bytes | None

_STEPS_PER_CHECK = 10_000
"""Steps of SQLite between two questions whether a query is to end, less than a millisecond."""


class _Owned:
    """A connection that closes when nothing refers to this.

    A connection refers to itself, so without an owner it would wait for a garbage collection.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    __del__ = close


class SqliteDatabase(Database):
    """The SQLite file of one data folder, which no other process may use.

    Raises:
        InvalidInput: The folder cannot be used.
        DocumentsDamaged: The file is damaged, and was moved aside.
    """

    def __init__(self, folder: Path, reserve: DiskReserve | None = None) -> None:
        self.folder = folder
        self.path = folder / FILE_NAME
        self._lock_file = lock_folder(folder)
        self._local = threading.local()
        # A thread keeps its own connection, which therefore closes when the thread ends.
        self._connections: WeakSet[_Owned] = WeakSet()
        self._connections_lock = threading.Lock()
        self.reserve = reserve or DiskReserve(folder)
        try:
            install_backup(folder)
            refuse_damage(folder)
            self._owned_writer = self._opened()
            self._writer = self._owned_writer.connection
        except BaseException:
            self.close()
            raise
        self.reserve.restore()

    def close(self) -> None:
        """Close all connections and unlock the folder."""
        self._close_connections()
        os.close(self._lock_file)

    def _close_connections(self) -> None:
        with self._connections_lock:
            for connection in self._connections:
                connection.close()
            self._connections.clear()

    def _opened(self) -> _Owned:
        try:
            owned = self._connect()
            writer = owned.connection
            is_present = check_schema(writer, self.path)
            writer.execute("PRAGMA journal_mode = WAL")
            writer.execute("PRAGMA synchronous = FULL")
            writer.execute(f"PRAGMA journal_size_limit = {MAX_IDLE_LOG_BYTES}")
            # What a delete removes is overwritten. The default depends on the build of SQLite.
            writer.execute("PRAGMA secure_delete = ON")
            if not is_present:
                forget_indexes(self.folder)
                writer.executescript(f"BEGIN IMMEDIATE; {SCHEMA} COMMIT;")
        except sqlite3.Error as error:
            if is_damage(error):
                self._close_connections()
                set_aside(self.folder, str(error))
                refuse_damage(self.folder)
            raise InvalidInput(
                "RAGCACHE_DATA_DIR",
                f"{self.path} cannot be opened: {error}",
                "check its permissions, or restore it with 'ragcache restore FILE'",
            ) from error
        return owned

    def _connect(self) -> _Owned:
        # Each thread has its own connection. Only close() uses those of other threads, which have
        # ended by then.
        connection = sqlite3.connect(
            self.path,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )
        owned = _Owned(connection)
        with self._connections_lock:
            self._connections.add(owned)
        connection.execute("PRAGMA foreign_keys = ON")
        return owned

    @property
    def reader(self) -> sqlite3.Connection:
        """The connection of the calling thread, which cannot write."""
        owned: _Owned | None = getattr(self._local, "owned", None)
        if owned is None:
            owned = self._connect()
            owned.connection.execute("PRAGMA query_only = ON")
            self._local.owned = owned
        return owned.connection

    @override
    @property
    def backend(self) -> str:
        return "embedded"

    @override
    @property
    def is_shared(self) -> bool:
        return False

    @override
    def disk(self) -> DiskUse:
        [(pages,)] = self.read("PRAGMA page_count")
        [(page_bytes,)] = self.read("PRAGMA page_size")
        return DiskUse(pages * page_bytes, self.reserve.free_bytes())

    # Reads

    @override
    def read(self, statement: Sql, parameters: Parameters = ()) -> list[Row]:
        with self.errors("read"):
            return self.reader.execute(*_bound(statement, parameters)).fetchall()

    @override
    def read_one(
        self,
        statement: Sql,
        parameters: Parameters = (),
        cancelled: Callable[[], bool] | None = None,
    ) -> Row | None:
        with self.errors("read"), _cancelled_by(self.reader, cancelled):
            row: Row | None = self.reader.execute(*_bound(statement, parameters)).fetchone()
        return row

    def iterate(
        self,
        sql: str,
        parameters: Sequence[Value],
        limit_s: float,
        cancelled: Callable[[], bool] | None,
    ) -> Generator[Row, None, None]:
        """Yield the rows of a query on committed data.

        Args:
            limit_s: Time after which SQLite ends the query.
            cancelled: SQLite ends the query soon after it returns True.

        Raises:
            Unavailable: The query has taken longer, or was cancelled.
        """
        with (
            self.errors("read"),
            _cancelled_by(self.reader, _or_after(limit_s, cancelled)),
            contextlib.closing(self.reader.execute(sql, parameters)) as rows,
        ):
            yield from rows

    def prepare_reader(self, sql: str) -> None:
        """Create a temporary object for the calling thread's reads, which writes no documents."""
        with self.errors("read"):
            self.reader.execute("PRAGMA query_only = OFF")
            try:
                self.reader.execute(sql)
            finally:
                self.reader.execute("PRAGMA query_only = ON")

    # Writes

    @contextlib.contextmanager
    def transaction(self, *, frees_space: bool = False) -> Iterator[None]:
        """Begin a transaction, which ``commit`` ends. Without it, all changes are rolled back.

        Args:
            frees_space: Whether it may use the disk reserve.
        """
        is_almost_full = frees_space and self.reserve.release_if_needed()
        with self.errors("written"):
            if is_almost_full:
                # Else the log would go on to grow, and take the reserve.
                self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
        if frees_space:
            self.reserve.restore()

    def commit(self) -> None:
        """Make the changes of the transaction durable and visible."""
        self._writer.execute("COMMIT")

    @override
    def execute(self, statement: Sql, parameters: Parameters = ()) -> int:
        return self._writer.execute(*_bound(statement, parameters)).rowcount

    def execute_rows(self, sql: str, rows: Iterable[Sequence[Value]]) -> None:
        """Execute a statement once for each row of parameters."""
        self._writer.executemany(sql, rows)

    @override
    def query(self, statement: Sql, parameters: Parameters = ()) -> list[Row]:
        return self._writer.execute(*_bound(statement, parameters)).fetchall()

    @override
    def query_one(self, statement: Sql, parameters: Parameters = ()) -> Row | None:
        row: Row | None = self._writer.execute(*_bound(statement, parameters)).fetchone()
        return row

    @override
    def insert(self, table: Table, names: Sequence[str], rows: Iterable[Sequence[Value]]) -> None:
        columns = ", ".join(f'"{name}"' for name in names)
        values = ", ".join("?" * len(names))
        self.execute_rows(f"INSERT INTO {table.name} ({columns}) VALUES ({values})", rows)

    @override
    def next_rows(self, table: Table, count: int) -> tuple[int, ...]:
        found = self.query_one("SELECT seq FROM sqlite_sequence WHERE name = ?", (table.name,))
        first = 1 if found is None else int(found[0]) + 1
        return tuple(range(first, first + count))

    @override
    def row_list(self, rows: Sequence[int] | Rows) -> str:
        return json.dumps([int(row) for row in rows])

    @override
    def rows_of(self, found: str | None) -> Rows:
        return np.sort(np.fromstring(found or "", np.int64, sep=","))

    @contextlib.contextmanager
    def leaving_freed_pages(self) -> Iterator[None]:
        """Do not overwrite pages that are freed inside. Use it for large tables without texts."""
        self._writer.execute("PRAGMA secure_delete = FAST")
        try:
            yield
        finally:
            self._writer.execute("PRAGMA secure_delete = ON")

    # Errors

    @contextlib.contextmanager
    def errors(self, action: str) -> Iterator[None]:
        """Translate the errors of SQLite."""
        try:
            yield
        except sqlite3.Error as error:
            if is_damage(error):
                self.mark_damaged(str(error))
                raise DocumentsDamaged(f"{error}; restart the retriever") from error
            raise Unavailable("retriever", f"documents cannot be {action}: {error}") from error

    def mark_damaged(self, problem: str) -> None:
        """Ask the next start to check the documents."""
        log.error("document store: damaged file=%s error=%s", self.path, problem)
        with contextlib.suppress(OSError):
            (self.folder / MARKER_NAME).write_text(problem)


def _bound(statement: Sql, parameters: Parameters) -> tuple[str, Parameters]:
    if isinstance(statement, str):
        return statement, parameters
    return statement.on(SQLITE, dict(parameters))


def _or_after(limit_s: float, cancelled: Callable[[], bool] | None) -> Callable[[], bool]:
    """Return a function that is also true after a time."""
    end_s = time.monotonic() + limit_s
    return lambda: time.monotonic() > end_s or (cancelled is not None and cancelled())


@contextlib.contextmanager
def _cancelled_by(
    connection: sqlite3.Connection, cancelled: Callable[[], bool] | None
) -> Iterator[None]:
    """Have SQLite end the queries of a connection once a function returns True."""
    if cancelled is None:
        yield
        return
    connection.set_progress_handler(cancelled, _STEPS_PER_CHECK)
    try:
        yield
    finally:
        connection.set_progress_handler(None, 0)
