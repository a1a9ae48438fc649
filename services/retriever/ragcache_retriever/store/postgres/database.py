"""Connections to PostgreSQL: a pool with deadlines, which reconnects after a restart."""

from __future__ import annotations

import contextlib
import logging
import select
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import psycopg
from psycopg import Cursor
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import TupleRow
from psycopg_pool import ConnectionPool, PoolTimeout
from sqlalchemy import BigInteger, Double, Integer, LargeBinary, Table, Text
from typing_extensions import override

from ragcache_core.errors import InvalidInput, RagCacheError, Unavailable
from ragcache_retriever.store.database import Database, Deadlocked, Parameters, Row, Sql
from ragcache_retriever.store.postgres import binary_types
from ragcache_retriever.store.postgres.binary_types import BigintArray, rows_of
from ragcache_retriever.store.postgres.cancellation import CancellableConnection
from ragcache_retriever.store.postgres.schema import prepare_schema
from ragcache_retriever.store.records import DiskUse, Rows
from ragcache_retriever.store.statements import POSTGRES, Statement

log = logging.getLogger(__name__)

URL_SETTING = "RAGCACHE_BACKEND_URL"
APPLICATION_NAME = "ragcache-retriever"
MAX_CONNECTIONS = 16
"""Of one retriever: its readers, its writer, and those that build indexes."""

CONNECT_LIMIT_S = 5
STATEMENT_LIMIT_S = 30
LOCK_LIMIT_S = 15
IDLE_LIMIT_S = 60
"""Time after which the server ends a transaction whose retriever has stopped."""
_CLOSE_LIMIT_S = 5.0

_LIMITS = (
    f"-c statement_timeout={STATEMENT_LIMIT_S}s -c lock_timeout={LOCK_LIMIT_S}s"
    f" -c idle_in_transaction_session_timeout={IDLE_LIMIT_S}s"
    # Each search is too small for several server processes.
    " -c max_parallel_workers_per_gather=0 -c jit=off"
)

Connection: TypeAlias = CancellableConnection

_COPY_TYPES = {
    BigInteger: "int8",
    Integer: "int4",
    Double: "float8",
    Text: "text",
    LargeBinary: "bytea",
}


class PostgresDatabase(Database):
    """One schema of a PostgreSQL database, the first of the URL's search path.

    It connects with the first call, so that a database that starts later is waited for.

    Raises:
        InvalidInput: The URL is not one of PostgreSQL.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._conninfo = _conninfo(url)
        self._pool = ConnectionPool(
            self._conninfo,
            connection_class=CancellableConnection,
            min_size=1,
            max_size=MAX_CONNECTIONS,
            kwargs={"autocommit": True},
            configure=binary_types.register,
            timeout=CONNECT_LIMIT_S,
            open=False,
            name="postgres",
        )
        self._opening = threading.Lock()
        self._is_open = False
        self._transaction: Connection | None = None

    def close(self) -> None:
        """Close all connections."""
        self._pool.close(_CLOSE_LIMIT_S)

    @contextlib.contextmanager
    def connection(self) -> Iterator[Connection]:
        """Lend a connection in autocommit mode, which has answered since the server started.

        Raises:
            Unavailable: PostgreSQL does not answer, or refuses what the caller does.
            InvalidInput: The database cannot be used.
        """
        with self.errors():
            self._open()
            connection = self._working_connection()
            try:
                yield connection
            finally:
                self._pool.putconn(connection)

    def new_connection(self) -> Connection:
        """Open a connection outside the pool, without a limit of its statements' time."""
        connection = CancellableConnection.connect(self._conninfo, autocommit=True)
        binary_types.register(connection)
        connection.execute("SET statement_timeout = 0")
        return connection

    @override
    @property
    def backend(self) -> str:
        return "postgres"

    @override
    @property
    def is_shared(self) -> bool:
        return True

    @override
    def disk(self) -> DiskUse:
        [(num_bytes,)] = self.read(
            "SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class"
            " WHERE relnamespace = current_schema()::regnamespace AND relkind = 'r'"
        )
        return DiskUse(int(num_bytes), None)

    # Reads of any thread

    @override
    def read(self, statement: Sql, parameters: Parameters = ()) -> list[Row]:
        with self.connection() as connection:
            return _executed(connection, statement, parameters).fetchall()

    @override
    def read_one(
        self,
        statement: Sql,
        parameters: Parameters = (),
        cancelled: Callable[[], bool] | None = None,
    ) -> Row | None:
        with self.connection() as connection, connection.cancelled_by(cancelled):
            return _executed(connection, statement, parameters).fetchone()

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """Lend a connection whose queries all see the same state."""
        with self.connection() as connection:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                yield connection
            finally:
                if not connection.closed:
                    connection.execute("ROLLBACK")

    # Writes of the writer's thread

    @contextlib.contextmanager
    def transaction(self, *, frees_space: bool = False) -> Iterator[None]:
        """See Database. The server keeps its own reserve."""
        with self.connection() as connection:
            connection.execute("BEGIN")
            self._transaction = connection
            try:
                yield
            finally:
                self._transaction = None
                if not connection.closed and connection.pgconn.transaction_status != 0:
                    connection.execute("ROLLBACK")

    @override
    def commit(self) -> None:
        self._writer.execute("COMMIT")

    @override
    def execute(self, statement: Sql, parameters: Parameters = ()) -> int:
        return _executed(self._writer, statement, parameters).rowcount

    @override
    def query(self, statement: Sql, parameters: Parameters = ()) -> list[Row]:
        return _executed(self._writer, statement, parameters).fetchall()

    @override
    def query_one(self, statement: Sql, parameters: Parameters = ()) -> Row | None:
        return _executed(self._writer, statement, parameters).fetchone()

    @override
    def insert(self, table: Table, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        types = [_COPY_TYPES[type(table.c[name].type)] for name in names]
        self.copy(f"{table.name} ({', '.join(names)})", types, rows)

    def copy(self, table: str, types: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Insert rows within the transaction.

        Args:
            table: Its name and the columns in brackets.
            types: Of the columns; bytea where ``rows`` has PostgreSQL's binary format.
        """
        with (
            self._writer.cursor() as cursor,
            cursor.copy(f"COPY {table} FROM STDIN (FORMAT BINARY)") as copy,
        ):
            copy.set_types(types)
            for row in rows:
                copy.write_row(row)

    def has_table(self, name: str) -> bool:
        """Whether the transaction sees a table."""
        [(has_table,)] = self.query("SELECT to_regclass(%s) IS NOT NULL", (name,))
        return bool(has_table)

    @override
    def next_rows(self, table: Table, count: int) -> tuple[int, ...]:
        found = self.query(
            "SELECT nextval(pg_get_serial_sequence(%s, 'row')) FROM generate_series(1, %s)",
            (table.name, count),
        )
        return tuple(sorted(row for (row,) in found))

    @override
    def row_list(self, rows: Sequence[int] | Rows) -> BigintArray:
        return BigintArray(rows)

    @override
    def rows_of(self, found: bytes | None) -> Rows:
        return np.sort(rows_of(found))

    @property
    def _writer(self) -> Connection:
        assert self._transaction is not None, "there is no transaction"
        return self._transaction

    def _open(self) -> None:
        if self._is_open:
            return
        with self._opening:
            if not self._is_open:
                with psycopg.connect(self._conninfo) as connection:
                    prepare_schema(connection)
                self._pool.open()
                self._is_open = True

    def _working_connection(self) -> Connection:
        """Return a connection of the pool. It replaces those that a restart has broken."""
        connection: Connection = self._pool.getconn()
        if _has_ended(connection):
            self._pool.putconn(connection)
            self._pool.check()
            connection = self._pool.getconn()
        return connection

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Translate the errors of PostgreSQL."""
        try:
            yield
        except RagCacheError:
            raise
        except psycopg.DataError as error:
            if error.sqlstate is not None:
                raise Unavailable("PostgreSQL", " ".join(str(error).split())) from error
            raise InvalidInput(
                "document", str(error), "send text without NUL characters"
            ) from error
        except psycopg.errors.DeadlockDetected as error:
            raise Deadlocked("PostgreSQL", " ".join(str(error).split())) from error
        except (psycopg.Error, PoolTimeout) as error:
            problem = " ".join(str(error).split())
            raise Unavailable("PostgreSQL", f"{problem} ({URL_SETTING})") from error


def _executed(connection: Connection, statement: Sql, parameters: Parameters) -> Cursor[TupleRow]:
    if isinstance(statement, Statement):
        statement, parameters = statement.on(POSTGRES, dict(parameters))
    return connection.execute(statement, parameters, binary=True)


def _has_ended(connection: Connection) -> bool:
    """Whether the server has said something to an idle connection, which is that it ends."""
    if connection.closed:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _conninfo(url: str) -> str:
    if not url.startswith(("postgresql://", "postgres://")):
        raise InvalidInput(
            URL_SETTING, "is no URL of PostgreSQL", "set postgresql://USER:PASSWORD@HOST/DATABASE"
        )
    try:
        options = str(conninfo_to_dict(url).get("options") or "")
        return make_conninfo(
            url,
            options=f"{_LIMITS} {options}",
            connect_timeout=CONNECT_LIMIT_S,
            # A connection to a lost node ends within seconds.
            tcp_user_timeout=1000 * CONNECT_LIMIT_S,
            keepalives_idle=CONNECT_LIMIT_S,
            application_name=APPLICATION_NAME,
        )
    except psycopg.ProgrammingError as error:
        # The message may have the password.
        raise InvalidInput(
            URL_SETTING, "cannot be read", "set postgresql://USER:PASSWORD@HOST/DATABASE"
        ) from error
