"""The lexical leg: BM25 over the words of chunks, by FTS5.

Each generation has a table of its own, so that the weight of a word follows from its collection.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from ragcache_retriever.search.lexical import HEADINGS_WEIGHT, TEXT_WEIGHT, TITLE_WEIGHT
from ragcache_retriever.store.records import LexicalHit, Rows
from ragcache_retriever.store.sqlite.database import Database, Row
from ragcache_retriever.store.sqlite.schema import create_lexical_table, lexical_table

MAX_LISTED_ROWS = 1 << 14
"""Allowed rows up to which SQLite tests them itself. Above, the list costs more than the tests."""

LIMIT_S = 1.0
"""Longest time of a query. Words of a large collection that most chunks have take longer."""

_COLUMNS = "title, headings, text"
_OF_DOCUMENT = (
    " chunks.row, title, heading_path, text FROM chunks JOIN documents"
    " ON documents.row = chunks.document WHERE chunks.document = ? AND chunks.generation = ?"
    " ORDER BY chunks.row"
)


class LexicalTables:
    """Full-text tables of generations. Changes need a transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, generation: int) -> None:
        """Create the table of a new generation."""
        self._database.execute(create_lexical_table(generation))

    def drop(self, generation: int) -> None:
        """Remove the table of a generation, if it is there."""
        with self._database.leaving_freed_pages():
            self._database.execute(f"DROP TABLE IF EXISTS {lexical_table(generation)}")

    def has(self, generation: int) -> bool:
        """Whether a generation has a table."""
        found = self._database.query_one(
            "SELECT 1 FROM sqlite_master WHERE name = ?", (lexical_table(generation),)
        )
        return found is not None

    def add_document(self, generation: int, document: int) -> None:
        """Add the words of a document's chunks, which are stored."""
        self._database.execute(
            f"INSERT INTO {lexical_table(generation)} (rowid, {_COLUMNS}) SELECT{_OF_DOCUMENT}",
            (document, generation),
        )

    def remove_document(self, generation: int, document: int) -> None:
        """Remove the words of a document's chunks, which are stored with the same title still."""
        table = lexical_table(generation)
        self._database.execute(
            f"INSERT INTO {table} ({table}, rowid, {_COLUMNS}) SELECT 'delete',{_OF_DOCUMENT}",
            (document, generation),
        )

    def hits(
        self, generation: int, words: Sequence[str], limit: int, allowed: Rows | None
    ) -> list[LexicalHit]:
        """See DocumentStore.lexical_hits. Any thread may call it."""
        question = match_expression(words)
        if not question or (allowed is not None and not len(allowed)):
            return []
        table = lexical_table(generation)
        weights = f"{TITLE_WEIGHT}, {HEADINGS_WEIGHT}, {TEXT_WEIGHT}"
        select = f"SELECT rowid, -bm25({table}, {weights}) AS score FROM {table} WHERE {table} "
        ordered = " ORDER BY score DESC, rowid LIMIT ?"
        if allowed is None:
            rows: Iterator[Row] = self._database.iterate(
                f"{select} MATCH ?{ordered}", (question, limit), limit_s=LIMIT_S
            )
        elif len(allowed) <= MAX_LISTED_ROWS:
            # With "+", FTS5 ranks all matches once, and not once for each row.
            rows = self._database.iterate(
                f"{select} MATCH ? AND +rowid IN (SELECT value FROM json_each(?)){ordered}",
                (question, json.dumps(allowed.tolist()), limit),
                limit_s=LIMIT_S,
            )
        else:
            every = self._database.iterate(
                f"{select} MATCH ?{ordered}", (question, -1), limit_s=LIMIT_S
            )
            rows = _allowed_only(every, allowed, limit)
        return [LexicalHit(row, score) for row, score in rows]


def match_expression(words: Sequence[str]) -> str:
    """Return the FTS5 query for chunks with any of the words."""
    quoted = ('"' + word.replace('"', '""').replace("\0", "") + '"' for word in words)
    return " OR ".join(quoted)


def _allowed_only(rows: Iterator[Row], allowed: Rows, limit: int) -> Iterator[Row]:
    num_found = 0
    for row in rows:
        i = int(np.searchsorted(allowed, row[0]))
        if i < len(allowed) and allowed[i] == row[0]:
            yield row
            num_found += 1
            if num_found == limit:
                return
