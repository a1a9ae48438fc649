"""The schema of the SQLite file, and the check that a file has it."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from pathlib import Path
from typing import Final

from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.lexical.terms import IDENTIFIER_MARK, IDENTIFIER_SYMBOLS
from ragcache_retriever.store.statements import SQLITE
from ragcache_retriever.store.tables import creation

SCHEMA_VERSION = 8
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


_GENERATION_TABLE: Final = re.compile(r"(?:lexical|detached)_([0-9]{1,18})(?:_[a-z]+)?")
DETACHED_PARTS: Final = ("data", "docsize")
"""Tables of FTS5 that grow with the chunks. A full-text table is removed in steps: these parts get
other names first."""


def detached_table(generation: int, part: str) -> str:
    """Return the name of a part of a full-text table that is being removed."""
    return f"detached_{generation}_{part}"


def check_objects(connection: sqlite3.Connection) -> None:
    """Refuse a file with other tables, indexes, triggers or views than this release creates.

    SQLite runs the SQL of a trigger or of a view as that of the retriever. So each statement of the
    file's schema has to be equal to that of a new file, apart from white space.

    Raises:
        InvalidInput: An object is missing, or is another one.
        sqlite3.Error: The file is damaged.
    """
    found = _objects(connection)
    generations = {int(m[1]) for name, *_ in found if (m := _GENERATION_TABLE.fullmatch(name))}
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as model:
        model.executescript(SCHEMA)
        needed = _objects(model)
        for generation in generations:
            model.execute(create_lexical_table(generation))
        allowed = _objects(model)
        configs = {generation: _config(model, generation) for generation in generations}
        for generation in generations:
            for part in DETACHED_PARTS:
                name = f"{lexical_table(generation)}_{part}"
                model.execute(f"ALTER TABLE {name} RENAME TO {detached_table(generation, part)}")
        allowed |= _objects(model)
    names = {name for name, *_ in found}
    for problem, objects in (("has", found - allowed), ("lacks", needed - found)):
        if objects:
            name = min(objects)[0]
            raise _unexpected(f"{problem} the database object {name!r}, or has it in another form")
    for generation, config in configs.items():
        name = lexical_table(generation)
        if name in names and _config(connection, generation) != config:
            raise _unexpected(f"has other settings of {name!r}")


def _unexpected(problem: str) -> InvalidInput:
    return InvalidInput("backup", problem, "send a file of `ragcache backup` of this release")


def _objects(connection: sqlite3.Connection) -> set[tuple[str, str, str, str]]:
    """Return name, kind, table and SQL of each object."""
    found = connection.execute("SELECT name, type, tbl_name, coalesce(sql, '') FROM sqlite_master")
    return {(name, kind, table, " ".join(sql.split())) for name, kind, table, sql in found}


def _config(connection: sqlite3.Connection, generation: int) -> list[tuple[object, ...]]:
    """Return the settings of a full-text table. They may name a function that ranks."""
    table = lexical_table(generation)
    return connection.execute(f"SELECT k, v FROM {table}_config ORDER BY k").fetchall()
