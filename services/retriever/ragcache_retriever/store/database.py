"""What the tables need of a database, SQLite or PostgreSQL.

One thread at a time changes documents, inside ``transaction``; any thread reads. Every method
raises Unavailable if the database fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

from sqlalchemy import Table

from ragcache_core.errors import Unavailable
from ragcache_retriever.store.records import DiskUse, Rows
from ragcache_retriever.store.statements import Statement

Row: TypeAlias = tuple[Any, ...]
Sql: TypeAlias = Statement | str
"""A statement of all databases, or the SQL of this one."""
Parameters: TypeAlias = Sequence[Any] | Mapping[str, Any]


class Deadlocked(Unavailable):
    """The database has undone a transaction, because it and another one waited for each other."""


class Database(Protocol):
    """The connections to one database."""

    @property
    def backend(self) -> str:
        """Name of the backend: "embedded" or "postgres"."""

    @property
    def is_shared(self) -> bool:
        """Whether other processes change the same documents."""

    def close(self) -> None:
        """Release files and connections. No other call may run."""

    def disk(self) -> DiskUse:
        """Return the used and the free disk space."""

    # Reads of committed data

    def read(self, statement: Sql, parameters: Parameters = ...) -> Sequence[Row]:
        """Return the rows of a query."""

    def read_one(
        self,
        statement: Sql,
        parameters: Parameters = ...,
        cancelled: Callable[[], bool] | None = None,
    ) -> Row | None:
        """Return the first row of a query, or None.

        Args:
            cancelled: Asked every few milliseconds. Once it returns True, the query is ended and
                Unavailable raised.
        """

    # Changes, and reads that see them

    def transaction(self, *, frees_space: bool = False) -> AbstractContextManager[None]:
        """Undo all changes made inside, unless ``commit`` is called.

        Args:
            frees_space: Whether the changes remove data. They may use the reserve of a full disk.
        """

    def commit(self) -> None:
        """Make the transaction's changes durable and visible. An error undoes all of them."""

    def query(self, statement: Sql, parameters: Parameters = ...) -> Sequence[Row]:
        """Return the rows of a statement."""

    def query_one(self, statement: Sql, parameters: Parameters = ...) -> Row | None:
        """Return the first row of a statement, or None."""

    def execute(self, statement: Sql, parameters: Parameters = ...) -> int:
        """Execute a statement and return the number of changed rows."""

    def insert(self, table: Table, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Insert many rows in the fastest way.

        Args:
            names: Of the columns of ``rows``.
        """

    def next_rows(self, table: Table, count: int) -> tuple[int, ...]:
        """Return ascending numbers of rows that will be inserted, never returned again."""

    # Lists of rows

    def row_list(self, rows: Sequence[int] | Rows) -> object:
        """Return a list as a parameter of OneOf."""

    def rows_of(self, found: Any) -> Rows:
        """Return the sorted rows of AllRows."""
