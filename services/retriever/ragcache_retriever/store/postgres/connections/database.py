"""Connections to PostgreSQL: a pool with deadlines, which reconnects after a restart."""

from __future__ import annotations

import contextlib
import logging
import select
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import TupleRow
from psycopg_pool import ConnectionPool, PoolTimeout

from ragcache_core.errors import InvalidInput, RagCacheError, Unavailable
from ragcache_retriever.store.postgres.connections import binary_types
from ragcache_retriever.store.postgres.connections.cancellation import CancellableConnection
from ragcache_retriever.store.postgres.schema import prepare_schema

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
Row: TypeAlias = TupleRow


class PostgresDatabase:
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

    # Reads of any thread

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Return the rows of a query on committed data."""
        with self.connection() as connection:
            return connection.execute(sql, parameters, binary=True).fetchall()

    def read_one(self, sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        """Return the first row of a query on committed data, or None."""
        with self.connection() as connection:
            return connection.execute(sql, parameters, binary=True).fetchone()

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
    def transaction(self) -> Iterator[None]:
        """See DocumentStore.transaction."""
        with self.connection() as connection:
            connection.execute("BEGIN")
            self._transaction = connection
            try:
                yield
            finally:
                self._transaction = None
                if not connection.closed and connection.pgconn.transaction_status != 0:
                    connection.execute("ROLLBACK")

    def commit(self) -> None:
        """See DocumentStore.commit."""
        self._writer.execute("COMMIT")

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Execute a statement of the transaction and return the number of changed rows."""
        return self._writer.execute(sql, parameters).rowcount

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Return the rows of a statement of the transaction."""
        return self._writer.execute(sql, parameters, binary=True).fetchall()

    def query_one(self, sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        """Return the first row of a statement of the transaction, or None."""
        return self._writer.execute(sql, parameters, binary=True).fetchone()

    def copy(self, table: str, types: Sequence[str], rows: Iterator[Sequence[Any]]) -> None:
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
        except (psycopg.Error, PoolTimeout) as error:
            problem = " ".join(str(error).split())
            raise Unavailable("PostgreSQL", f"{problem} ({URL_SETTING})") from error


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
