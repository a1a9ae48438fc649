"""The lexical leg: BM25 over the terms of chunks, by FTS5.

Each generation has a table of its own, so that the weight of a word follows from its collection.

FTS5 needs about a microsecond for each chunk that it ranks. So only the rarer words of a question
find chunks, see ``word_choice``. The scores are those of all words. With a filter, the scores are
those of ``allowed_scores``: FTS5 itself would rank by the words of hidden chunks, too.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from typing_extensions import override

from ragcache_core.retrieval.lexical.allowed_scores import (
    Floats,
    Indexes,
    WordUse,
    allowed_scores,
)
from ragcache_core.retrieval.lexical.terms import terms_of
from ragcache_core.retrieval.lexical.word_choice import WordChoice, choose_words
from ragcache_retriever.search.lexical import HEADINGS_WEIGHT, TEXT_WEIGHT, TITLE_WEIGHT
from ragcache_retriever.store.database import Row
from ragcache_retriever.store.generation_tables import LexicalTables, LexicalText
from ragcache_retriever.store.records import LexicalHit, Rows
from ragcache_retriever.store.sqlite.database import SqliteDatabase
from ragcache_retriever.store.sqlite.schema import (
    DETACHED_PARTS,
    TERM_TOKENIZER,
    create_lexical_table,
    detached_table,
    lexical_table,
)
from ragcache_retriever.store.word_frequencies import WordFrequencies, most_counted

LIMIT_S = 1.0
"""Longest time of a query. Words of a large collection that many chunks have take longer."""

MAX_USES = 300_000
"""Most uses of words that a search with a filter reads, about 0.4 s. The rarest word comes first. A
word that does not fit adds to no score, and of the rarest one the first uses count."""

_ROWS_AT_ONCE = dict(zip(DETACHED_PARTS, (256, 16_384), strict=True))
"""How many rows of each part go at once: about a megabyte, and a third of one."""

_AVERAGES, _STRUCTURE = 1, 10
"""Ids of the records of FTS5 that are no pages of words. See the comment on top of its source file
``fts5_index.c``."""

_COLUMNS = "title, headings, text"


class SqliteLexical(LexicalTables):
    """Full-text tables of generations. See LexicalTables."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database
        self._frequencies = WordFrequencies()

    @override
    def create(self, generation: int) -> None:
        self._database.execute(create_lexical_table(generation))

    def detach(self, generation: int) -> None:
        """Let no search use the table of a generation. ``remove_some`` then removes its pages.

        FTS5 keeps its pages as rows of tables, and dropping one takes time in proportion to them.
        So these tables are renamed, and FTS5 drops what is left. It opens its table for that, and
        needs two records.
        """
        if not self.has(generation):
            return
        table = lexical_table(generation)
        for part in _ROWS_AT_ONCE:
            self._database.execute(
                f"ALTER TABLE {table}_{part} RENAME TO {detached_table(generation, part)}"
            )
        self._database.execute(f"CREATE TABLE {table}_data (id INTEGER PRIMARY KEY, block BLOB)")
        self._database.execute(
            f"INSERT INTO {table}_data SELECT id, block FROM {detached_table(generation, 'data')}"
            f" WHERE id IN ({_AVERAGES}, {_STRUCTURE})"
        )
        with self._database.leaving_freed_pages():
            self._database.execute(f"DROP TABLE {table}")

    @override
    def remove_some(self, generation: int) -> bool:
        for part, limit in _ROWS_AT_ONCE.items():
            table = detached_table(generation, part)
            if not self._is_table(table):
                continue
            with self._database.leaving_freed_pages():
                removed = self._database.execute(
                    f"DELETE FROM {table} WHERE rowid IN"
                    f" (SELECT rowid FROM {table} ORDER BY rowid LIMIT ?)",
                    (limit,),
                )
                if removed < limit:
                    self._database.execute(f"DROP TABLE {table}")
            return True
        return False

    @override
    def has(self, generation: int) -> bool:
        return self._is_table(lexical_table(generation))

    @override
    def add(self, generation: int, texts: Sequence[LexicalText]) -> None:
        self._database.execute_rows(
            f"INSERT INTO {lexical_table(generation)} (rowid, {_COLUMNS}) VALUES (?, ?, ?, ?)",
            map(_terms_row, texts),
        )

    @override
    def remove(self, generation: int, texts: Sequence[LexicalText]) -> None:
        table = lexical_table(generation)
        self._database.execute_rows(
            f"INSERT INTO {table} ({table}, rowid, {_COLUMNS}) VALUES ('delete', ?, ?, ?, ?)",
            map(_terms_row, texts),
        )

    @override
    def hits(
        self,
        generation: int,
        terms: Sequence[str],
        limit: int,
        *,
        allowed: Rows | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[LexicalHit]:
        if allowed is not None:
            return self._allowed_hits(generation, terms, limit, allowed, cancelled)
        choice = self._choice(generation, terms, cancelled)
        question = _choice_expression(choice)
        if not question:
            return []
        table = lexical_table(generation)
        weights = f"{TITLE_WEIGHT}, {HEADINGS_WEIGHT}, {TEXT_WEIGHT}"
        # The query of a choice with scoring words counts every word twice.
        score = f"-bm25({table}, {weights})" + (" / 2" if choice.scoring else "")
        has_identifier = f"(rowid IN (SELECT rowid FROM {table} WHERE {table} MATCH ?))"
        num_identifiers = " + ".join(("0", *[has_identifier] * len(choice.identifiers)))
        identifiers = [_phrase(one) for one in choice.identifiers]
        rows = self._database.iterate(
            f"SELECT rowid, {score} AS score, {num_identifiers} AS num_identifiers FROM {table}"
            f" WHERE {table} MATCH ? ORDER BY num_identifiers DESC, score DESC, rowid LIMIT ?",
            (*identifiers, question, limit),
            limit_s=LIMIT_S,
            cancelled=cancelled,
        )
        return [LexicalHit(*row) for row in rows]

    def _allowed_hits(
        self,
        generation: int,
        terms: Sequence[str],
        limit: int,
        allowed: Rows,
        cancelled: Callable[[], bool] | None,
    ) -> list[LexicalHit]:
        """Return the hits among some rows.

        Of other rows, the scores tell only that a word is too common to be read (MAX_USES).
        """
        sized = self._database.read_one(
            "SELECT size_tokens FROM generations WHERE row = ?", (generation,)
        )
        if sized is None or not len(allowed):
            return []
        end_s = time.monotonic() + LIMIT_S
        table, instances = lexical_table(generation), f"instances_{generation}"
        self._database.prepare_reader(
            f"CREATE VIRTUAL TABLE IF NOT EXISTS temp.{instances}"
            f" USING fts5vocab(main, {table}, instance)"
        )

        def read(sql: str, *parameters: str | int) -> list[Row]:
            left_s = end_s - time.monotonic()
            return list(self._database.iterate(sql, parameters, left_s, cancelled))

        stems = stems_of(terms)
        _, frequencies = self._counted(generation, list(stems), cancelled)
        uses: dict[str, WordUse] = {}
        left = MAX_USES
        for word in sorted(stems, key=lambda word: (frequencies[word], word)):
            if uses and frequencies[word] > left:
                break
            found = read(
                f"SELECT doc, CASE col WHEN 'title' THEN {TITLE_WEIGHT} WHEN 'headings' THEN"
                f" {HEADINGS_WEIGHT} ELSE {TEXT_WEIGHT} END FROM temp.{instances} WHERE term = ?"
                " LIMIT ?",
                *(stems[word], left + 1),
            )
            if uses and len(found) > left:
                break
            left -= len(found)
            rows = np.fromiter((row for row, _ in found), np.int64, len(found))
            weights = np.fromiter((weight for _, weight in found), np.float64, len(found))
            at = np.minimum(np.searchsorted(allowed, rows), len(allowed) - 1)
            is_allowed = allowed[at] == rows
            uses[word] = WordUse.of(at[is_allowed], weights[is_allowed])

        def lengths_of(indexes: Indexes) -> Floats:
            wanted = json.dumps(allowed[indexes].tolist())
            where = "WHERE id IN (SELECT value FROM json_each(?))"
            found = read(f"SELECT id, sz FROM {table}_docsize {where}", wanted)
            sizes: dict[int, bytes] = dict(found)
            lengths = (_num_terms(sizes.get(int(row), b"")) for row in allowed[indexes])
            return np.fromiter(lengths, np.float64, len(indexes))

        best = allowed_scores(uses, len(allowed), limit, float(sized[0]), lengths_of)
        return [LexicalHit(int(allowed[i]), score, number) for i, score, number in best]

    def _is_table(self, name: str) -> bool:
        found = self._database.query_one("SELECT 1 FROM sqlite_master WHERE name = ?", (name,))
        return found is not None

    def _choice(
        self,
        generation: int,
        terms: Sequence[str],
        cancelled: Callable[[], bool] | None,
    ) -> WordChoice:
        num_chunks, frequencies = self._counted(generation, terms, cancelled)
        return choose_words(frequencies, num_chunks)

    def _counted(
        self,
        generation: int,
        terms: Sequence[str],
        cancelled: Callable[[], bool] | None,
    ) -> tuple[int, dict[str, int]]:
        """Return the number of chunks, and how many of them have each word."""
        counted = self._database.read_one(
            "SELECT num_chunks FROM generations WHERE row = ?", (generation,)
        )
        num_chunks = 0 if counted is None else int(counted[0])
        count = functools.partial(
            count_chunks, self._database, generation, num_chunks, cancelled=cancelled
        )
        return num_chunks, self._frequencies.of(generation, terms, num_chunks, count)


def count_chunks(
    database: SqliteDatabase,
    generation: int,
    num_chunks: int,
    words: Sequence[str],
    cancelled: Callable[[], bool] | None = None,
) -> Iterator[int]:
    """Yield how many chunks have each word, at most ``most_counted``.

    Raises:
        Unavailable: Counting has taken longer than a search may.
    """
    table = lexical_table(generation)
    rows = database.iterate(
        "SELECT (SELECT count(*) FROM"
        f" (SELECT 1 FROM {table} WHERE {table} MATCH phrases.value LIMIT ?))"
        " FROM json_each(?) AS phrases ORDER BY phrases.key",
        (most_counted(num_chunks), json.dumps(list(map(_phrase, words)))),
        limit_s=LIMIT_S,
        cancelled=cancelled,
    )
    for (count,) in rows:
        yield count


def _terms_row(one: LexicalText) -> tuple[int, str, str, str]:
    headings = " ".join(" ".join(terms_of(heading)) for heading in one.headings)
    return one.row, " ".join(terms_of(one.title)), headings, " ".join(terms_of(one.text))


def match_expression(words: Sequence[str]) -> str:
    """Return the FTS5 query for chunks with any of the words."""
    return " OR ".join(map(_phrase, words))


def _choice_expression(choice: WordChoice) -> str:
    """Return the FTS5 query for chunks with any of the finding words.

    BM25 adds up the words wherever they are in the query. "(a) AND (a OR b OR b)" finds the chunks
    with "a", and counts both words twice in them.
    """
    finding = match_expression((*choice.identifiers, *choice.finding))
    if not choice.scoring:
        return finding
    return f"({finding}) AND ({finding} OR {match_expression(2 * choice.scoring)})"


def _phrase(word: str) -> str:
    """Return the FTS5 query for a word, as it is written."""
    return '"' + word.replace('"', '""').replace("\0", "") + '"'


def stems_of(words: Sequence[str]) -> dict[str, str]:
    """Return the stem under which FTS5 stores each word. Of words with one stem, the first."""
    stems: dict[str, str] = {}
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as model:
        model.execute(f'CREATE VIRTUAL TABLE words USING fts5(word, tokenize="{TERM_TOKENIZER}")')
        model.execute("CREATE VIRTUAL TABLE stems USING fts5vocab(words, instance)")
        rows = ((i, word.replace("\0", "")) for i, word in enumerate(words))
        model.executemany("INSERT INTO words (rowid, word) VALUES (?, ?)", rows)
        for i, stem in model.execute("SELECT doc, term FROM stems ORDER BY doc, offset"):
            stems.setdefault(stem, words[i])
    return {word: stem for stem, word in stems.items()}


def _num_terms(sizes: bytes) -> int:
    """Return the terms of a chunk. FTS5 stores those of each column as a variable-length number.

    Source: SQLite's file format, section 1.6. The first bytes have seven bits each, the highest
    ones first.
    """
    total = number = 0
    for byte in sizes:
        number = number << 7 | byte & 0x7F
        if byte < 0x80:
            total, number = total + number, 0
    return total
