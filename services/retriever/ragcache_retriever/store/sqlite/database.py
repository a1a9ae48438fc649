"""Connections to the SQLite file: one that writes in recorded transactions, and many that read.

Each change is one transaction, which is on disk when it commits (WAL with synchronous=FULL). A
process killed at any moment therefore loses no acknowledged change.

Every write goes through ``execute``, which records it. Followers repeat recorded statements, so
their SQL has to be deterministic: no random numbers and no clock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_core.retrieval.filters import number_of
from ragcache_retriever.store.change_log import ChangedRows
from ragcache_retriever.store.sqlite.files.backup import install_copy
from ragcache_retriever.store.sqlite.files.folder_lock import lock_folder
from ragcache_retriever.store.sqlite.files.recovery import recover
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from ragcache_retriever.store.sqlite.schema import FILE_NAME, SCHEMA, check_schema
from ragcache_retriever.store.sqlite.statements import Statement, StatementLog, Value

log = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 10.0
MAX_IDLE_LOG_BYTES = 16 << 20
"""Size to which SQLite's log is cut after its content is in the file."""
DAMAGE_MARKER = "damaged"
"""A file of this name in the folder asks the next start to recover the documents."""

Row: TypeAlias = tuple[Any, ...]

_DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_STEPS_PER_CHECK = 10_000
"""Steps of SQLite between two looks at the clock, less than a millisecond."""


class DatabaseDamaged(Unavailable):
    """The SQLite file cannot be read as it was written."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            "retriever",
            f"its documents are damaged ({problem}); restart it to recover them, or run"
            " 'ragcache restore FILE' with a backup",
            retry_after_s=30.0,
        )


class Database:
    """The SQLite file of one data folder, which no other process may use.

    Args:
        recover_file: Replaces a damaged file in a folder, by default by what can be read of it.

    Raises:
        InvalidInput: The folder cannot be used.
        RecoveryFailed: The file is damaged, and its documents cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        reserve: DiskReserve | None = None,
        recover_file: Callable[[Path], object] = recover,
    ) -> None:
        self._recover_file = recover_file
        self.folder = folder
        self.path = folder / FILE_NAME
        self._lock_file = lock_folder(folder)
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._connections_lock = threading.Lock()
        self._log = StatementLog()
        self._before_commit: list[Callable[[StatementLog], None]] = []
        self._after_commit: list[Callable[[], None]] = []
        self.may_write: Callable[[], bool] = lambda: True
        self.reserve = reserve or DiskReserve(folder)
        try:
            install_copy(folder)
            self._writer = self._opened_or_recovered()
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

    def _opened_or_recovered(self) -> sqlite3.Connection:
        marker = self.folder / DAMAGE_MARKER
        if not marker.exists():
            try:
                return self._opened()
            except DatabaseDamaged as error:
                self._close_connections()
                self.mark_damaged(str(error))
        self._recover_file(self.folder)
        marker.unlink()
        return self._opened()

    def _opened(self) -> sqlite3.Connection:
        try:
            writer = self._connect()
            is_present = check_schema(writer, self.path)
            writer.execute("PRAGMA journal_mode = WAL")
            writer.execute("PRAGMA synchronous = FULL")
            writer.execute(f"PRAGMA journal_size_limit = {MAX_IDLE_LOG_BYTES}")
            # What a delete removes is overwritten. The default depends on the build of SQLite.
            writer.execute("PRAGMA secure_delete = ON")
            if not is_present:
                writer.executescript(f"BEGIN IMMEDIATE; {SCHEMA} COMMIT;")
        except sqlite3.Error as error:
            if is_damage(error):
                raise DatabaseDamaged(str(error)) from error
            raise InvalidInput(
                "RAGCACHE_DATA_DIR",
                f"{self.path} cannot be opened: {error}",
                "check its permissions, or restore it with 'ragcache restore FILE'",
            ) from error
        return writer

    def _connect(self) -> sqlite3.Connection:
        # Each thread has its own connection. Only close() uses those of other threads, which have
        # ended by then.
        connection = sqlite3.connect(
            self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        with self._connections_lock:
            self._connections.append(connection)
        connection.execute("PRAGMA foreign_keys = ON")
        connection.create_function("number_of", 1, number_of, deterministic=True)
        return connection

    @property
    def reader(self) -> sqlite3.Connection:
        """The connection of the calling thread, which cannot write."""
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._connect()
            connection.execute("PRAGMA query_only = ON")
            self._local.connection = connection
        return connection

    # Reads

    def read(self, sql: str, parameters: Sequence[Value] = ()) -> list[Row]:
        """Return the rows of a query on committed data."""
        with self.errors("read"):
            return self.reader.execute(sql, parameters).fetchall()

    def read_one(self, sql: str, parameters: Sequence[Value] = ()) -> Row | None:
        """Return the first row of a query on committed data, or None."""
        with self.errors("read"):
            row: Row | None = self.reader.execute(sql, parameters).fetchone()
        return row

    def iterate(
        self,
        sql: str,
        parameters: Sequence[Value] = (),
        *,
        limit_s: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Generator[Row, None, None]:
        """Yield the rows of a query on committed data.

        Args:
            limit_s: Time after which SQLite ends the query. None: no limit.
            cancelled: Asked meanwhile if there is a limit. SQLite ends the query once it is True.

        Raises:
            Unavailable: The query has taken longer, or is cancelled.
        """
        with (
            self.errors("read"),
            _ending_after(self.reader, limit_s, cancelled),
            contextlib.closing(self.reader.execute(sql, parameters)) as rows,
        ):
            yield from rows

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let all reads of this thread see the same state."""
        with self.errors("read"):
            self.reader.execute("BEGIN")
            try:
                yield
            finally:
                self.reader.execute("COMMIT")

    # Writes

    @contextlib.contextmanager
    def transaction(
        self, *, frees_space: bool = False, is_repeated: bool = False
    ) -> Iterator[None]:
        """See DocumentStore.transaction.

        Args:
            is_repeated: Whether it repeats one of the writer, which ``may_write`` does not govern.

        Raises:
            Unavailable: This replica is not the writer (any more).
        """
        is_almost_full = frees_space and self.reserve.release_if_needed()
        with self.errors("written"):
            if is_almost_full:
                # Else the log would go on to grow, and take the reserve.
                self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._log = StatementLog()
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                if not is_repeated and not self.may_write():
                    raise Unavailable("retriever", "this replica is not the writer")
                yield
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
        if frees_space:
            self.reserve.restore()

    def execute(self, sql: str, parameters: Sequence[Value] = ()) -> sqlite3.Cursor:
        """Execute and record a statement that changes something. It returns no rows."""
        cursor = self._writer.execute(sql, parameters)
        self._record(sql, [parameters], cursor)
        return cursor

    def execute_many(self, sql: str, executions: Sequence[Sequence[Value]]) -> None:
        """Execute and record a statement once for each sequence of parameters."""
        if executions:
            self._record(sql, executions, self._writer.executemany(sql, executions))

    def execute_returning(self, sql: str, parameters: Sequence[Value] = ()) -> list[Row]:
        """Execute and record a statement with a RETURNING clause, and return its rows."""
        cursor = self._writer.execute(sql, parameters)
        rows: list[Row] = cursor.fetchall()
        if rows:
            self._log.statements.append(Statement(sql, [parameters]))
        return rows

    def query(self, sql: str, parameters: Sequence[Value] = ()) -> list[Row]:
        """Return the rows of a query that sees the changes of the transaction."""
        return self._writer.execute(sql, parameters).fetchall()

    def query_one(self, sql: str, parameters: Sequence[Value] = ()) -> Row | None:
        """Return the first row of a query that sees the changes of the transaction, or None."""
        row: Row | None = self._writer.execute(sql, parameters).fetchone()
        return row

    def repeat(self, repeated: StatementLog) -> None:
        """Execute the statements of another replica's transaction, without recording them."""
        for statement in repeated.statements:
            self._writer.executemany(statement.sql, statement.executions)

    def execute_locally(self, sql: str, parameters: Sequence[Value] = ()) -> sqlite3.Cursor:
        """Execute a statement that followers do not repeat, because it concerns this file."""
        return self._writer.execute(sql, parameters)

    @contextlib.contextmanager
    def leaving_freed_pages(self) -> Iterator[None]:
        """Do not overwrite pages that are freed inside. Use it for large tables without texts."""
        self._writer.execute("PRAGMA secure_delete = FAST")
        try:
            yield
        finally:
            self._writer.execute("PRAGMA secure_delete = ON")

    def note_rows(self, generation: int, removed: Sequence[int], added: Sequence[int]) -> None:
        """Record for followers which vectors the transaction changes."""
        self._log.rows.append(ChangedRows(generation, tuple(removed), tuple(added)))

    def note_collections(self) -> None:
        """Record for followers that the transaction changes collections or generations."""
        self._log.has_other_collections = True

    def before_commit(self, listener: Callable[[StatementLog], None]) -> None:
        """Have a function called at the end of each transaction that changes something."""
        self._before_commit.append(listener)

    def after_commit(self, listener: Callable[[], None]) -> None:
        """Have a function called after each commit of a transaction that changed something."""
        self._after_commit.append(listener)

    def commit(self) -> None:
        """See DocumentStore.commit."""
        has_changed = bool(self._log.statements)
        if has_changed and not self.may_write():
            raise Unavailable("retriever", "this replica is no longer the writer")
        if has_changed:
            for prepare in self._before_commit:
                prepare(self._log)
        self._writer.execute("COMMIT")
        self._log = StatementLog()
        if has_changed:
            for notify in self._after_commit:
                notify()

    def commit_locally(self) -> None:
        """Commit changes that are not recorded."""
        self._writer.execute("COMMIT")

    def _record(
        self, sql: str, executions: Sequence[Sequence[Value]], cursor: sqlite3.Cursor
    ) -> None:
        # A statement that changed no row here changes none at a follower.
        if cursor.rowcount != 0:
            self._log.statements.append(Statement(sql, executions))

    # Errors

    @contextlib.contextmanager
    def errors(self, action: str) -> Iterator[None]:
        """Translate the errors of SQLite."""
        try:
            yield
        except sqlite3.Error as error:
            if is_damage(error):
                self.mark_damaged(str(error))
                raise DatabaseDamaged(str(error)) from error
            raise Unavailable("retriever", f"documents cannot be {action}: {error}") from error

    def mark_damaged(self, problem: str) -> None:
        """Ask the next start to recover the documents."""
        log.error("document store: damaged file=%s error=%s", self.path, problem)
        with contextlib.suppress(OSError):
            (self.folder / DAMAGE_MARKER).write_text(problem)


@contextlib.contextmanager
def _ending_after(
    connection: sqlite3.Connection,
    limit_s: float | None,
    cancelled: Callable[[], bool] | None,
) -> Iterator[None]:
    """Have SQLite end the queries of a connection after a time, or when they are cancelled."""
    if limit_s is None:
        yield
        return
    end_s = time.monotonic() + limit_s

    def has_ended() -> bool:
        return time.monotonic() > end_s or (cancelled is not None and cancelled())

    connection.set_progress_handler(has_ended, _STEPS_PER_CHECK)
    try:
        yield
    finally:
        connection.set_progress_handler(None, 0)


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error says that the file is damaged."""
    # The lower byte is the primary code.
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _DAMAGE
