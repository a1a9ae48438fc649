"""Statements of SQLAlchemy Core: written once, compiled once for each kind of database.

The drivers execute them. SQLAlchemy's engine would add 50 microseconds to each of the 15 statements
of a change, and it hides what the databases need of their drivers: SQLite's progress handler and
pragmas, and PostgreSQL's cancellation, binary rows and COPY.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from sqlalchemy import ClauseElement
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.dialects.sqlite import dialect as sqlite_dialect
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import Text

SQLITE: Dialect = sqlite_dialect(paramstyle="named")
POSTGRES: Dialect = PGDialect_psycopg()  # type: ignore[no-untyped-call]

INDEXED_CHARACTERS = 64
"""Of a text, which an index of PostgreSQL has: an entry is at most a third of a page."""

Parameters: TypeAlias = Mapping[str, Any]


class Statement:
    """A statement with named parameters. Any thread may use it.

    A parameter with ``expanding`` is a list. Each length of it is another text of the statement.
    """

    def __init__(self, clause: ClauseElement) -> None:
        self._clause = clause
        self._compiled: dict[str, tuple[SQLCompiler, str, Parameters]] = {}

    def on(self, dialect: Dialect, parameters: Parameters) -> tuple[str, Parameters]:
        """Return the SQL of a database and all its parameters."""
        found = self._compiled.get(dialect.name)
        if found is None:
            compiled = self._clause.compile(dialect=dialect)
            assert isinstance(compiled, SQLCompiler)
            found = compiled, compiled.string, compiled.params
            self._compiled[dialect.name] = found
        compiled, text, constants = found
        if compiled.post_compile_params:
            expanded = compiled.construct_expanded_state(dict(parameters))
            return expanded.statement, expanded.parameters
        return text, {**constants, **parameters}


class OneOf(FunctionElement[bool]):
    """Whether a column of integers is in a list that ``Database.row_list`` has made.

    It has no type: SQLite has no booleans, and would use no index for "IN (...) = 1".
    """

    inherit_cache = True


class AllRows(FunctionElement[Any]):
    """All integers of a column as one value, which ``Database.rows_of`` reads.

    A million rows would take a second, and Python's lock meanwhile.
    """

    inherit_cache = True


class Indexed(FunctionElement[str]):
    """The part of a text that an index has: at least INDEXED_CHARACTERS of it."""

    inherit_cache = True
    type = Text()


@compiles(OneOf, "sqlite")
def _one_of_in_sqlite(element: OneOf, compiler: SQLCompiler, **kwargs: Any) -> str:
    column, rows = (compiler.process(one, **kwargs) for one in element.clauses)
    return f"{column} IN (SELECT value FROM json_each({rows}))"


@compiles(OneOf, "postgresql")
def _one_of_in_postgres(element: OneOf, compiler: SQLCompiler, **kwargs: Any) -> str:
    column, rows = (compiler.process(one, **kwargs) for one in element.clauses)
    return f"{column} = ANY({rows})"


@compiles(AllRows, "sqlite")
def _all_rows_in_sqlite(element: AllRows, compiler: SQLCompiler, **kwargs: Any) -> str:
    return f"group_concat({compiler.process(element.clauses, **kwargs)})"


@compiles(AllRows, "postgresql")
def _all_rows_in_postgres(element: AllRows, compiler: SQLCompiler, **kwargs: Any) -> str:
    return f"array_send(array_agg({compiler.process(element.clauses, **kwargs)}))"


@compiles(Indexed, "sqlite")
def _indexed_in_sqlite(element: Indexed, compiler: SQLCompiler, **kwargs: Any) -> str:
    return compiler.process(element.clauses, **kwargs)


@compiles(Indexed, "postgresql")
def _indexed_in_postgres(element: Indexed, compiler: SQLCompiler, **kwargs: Any) -> str:
    return f"left({compiler.process(element.clauses, **kwargs)}, {INDEXED_CHARACTERS})"
