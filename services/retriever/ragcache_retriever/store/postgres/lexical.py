"""The lexical leg in PostgreSQL: BM25 over tables of terms.

PostgreSQL's own ranking of text knows no inverse document frequency. So each generation has a table
with the stems of its chunks, how often each has it, and the length of the chunk. The score is that
of SQLite's FTS5, whose words are the same but for some rare ones.

As in SQLite, only the rarer words of a question find chunks (see ``word_choice``), and a search
ends after a second. The weight of a word follows from its frequency, which may be out of date.

Source: Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009, section 3.4.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import psycopg
from typing_extensions import override

from ragcache_core.errors import Unavailable
from ragcache_core.retrieval.lexical.allowed_scores import LENGTH_SHARE, SATURATION
from ragcache_core.retrieval.lexical.terms import terms_of
from ragcache_core.retrieval.lexical.word_choice import choose_words, word_weight
from ragcache_retriever.search.lexical import HEADINGS_WEIGHT, TEXT_WEIGHT, TITLE_WEIGHT
from ragcache_retriever.store.generation_tables import LexicalTables, LexicalText
from ragcache_retriever.store.postgres.binary_types import BigintArray
from ragcache_retriever.store.postgres.database import Connection, PostgresDatabase
from ragcache_retriever.store.postgres.schema import postings_table
from ragcache_retriever.store.records import LexicalHit, Rows
from ragcache_retriever.store.word_frequencies import WordFrequencies, most_counted

LIMIT_S = 1.0
"""Longest time of a search. Words of a large collection that many chunks have take longer."""

LOOKUP_COST = 8
"""Rows of a word that are read in the time in which one row is looked up."""

TEXTS_AT_ONCE = 256
"""Chunks of one statement. A character of Chinese is two terms, and each takes 100 bytes here."""

_ASKED = """
SELECT num_chunks, num_words, size_tokens,
    ARRAY(SELECT DISTINCT (ts_lexize('ragcache_stems', word))[1]
        FROM unnest(%s::text[]) AS word WHERE ts_lexize('ragcache_stems', word) != '{}')
FROM generations WHERE row = %s
"""
_COUNT = "SELECT count(*) FROM (SELECT 1 FROM {table} WHERE word = %s LIMIT %s) AS counted"
_COUNT_ALLOWED = """
SELECT word, count(*) FROM {table}
WHERE word = ANY(%s::text[]) AND row IN (SELECT unnest(%s::bigint[])) GROUP BY word
"""
# "OFFSET 0" keeps PostgreSQL from joining earlier: it would look up each of many rows.
_HITS = """
WITH found AS MATERIALIZED (
    SELECT word, row, frequency, length FROM (
        SELECT word, row, frequency, length FROM {table}
        WHERE word = ANY(%(finding)s::text[]) OFFSET 0) AS every {condition}
), candidates AS MATERIALIZED (
    SELECT DISTINCT row FROM found
), counted AS (
    SELECT * FROM found
    UNION ALL
    SELECT * FROM (
        SELECT word, row, frequency, length FROM {table}
        WHERE word = ANY(%(read)s::text[]) OFFSET 0) AS every
    WHERE row IN (SELECT row FROM candidates)
    UNION ALL
    SELECT postings.* FROM candidates CROSS JOIN unnest(%(looked_up)s::text[]) AS asked (word)
    CROSS JOIN LATERAL (
        SELECT word, row, frequency, length FROM {table}
        WHERE {table}.word = asked.word AND {table}.row = candidates.row OFFSET 0) AS postings
)
SELECT counted.row, sum(weight * frequency * {gain}
    / (frequency + {saturation} * ({rest} + {share} * length / %(mean_length)s))) AS score,
    count(*) FILTER (WHERE word = ANY(%(identifiers)s::text[])) AS num_identifiers
FROM counted JOIN unnest(%(words)s::text[], %(weights)s::float8[]) AS asked (word, weight)
    USING (word)
GROUP BY counted.row ORDER BY num_identifiers DESC, score DESC, counted.row LIMIT %(limit)s
"""


class PostgresLexical(LexicalTables):
    """Tables of words. See LexicalTables."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        self._frequencies = WordFrequencies()

    @override
    def create(self, generation: int) -> None:
        self._database.execute(
            f'CREATE TABLE {postings_table(generation)} (word text COLLATE "C", row bigint,'
            " frequency real NOT NULL, length integer NOT NULL,"
            " PRIMARY KEY (word, row) INCLUDE (frequency, length))"
        )

    @override
    def has(self, generation: int) -> bool:
        return self._database.has_table(postings_table(generation))

    def detach(self, generation: int) -> None:
        """Remove the table. The server removes its files at once, of any size."""
        self._database.execute(f"DROP TABLE IF EXISTS {postings_table(generation)}")

    def remove_some(self, generation: int) -> bool:
        """See LexicalTables. None are left."""
        return False

    @override
    def add(self, generation: int, texts: Sequence[LexicalText]) -> None:
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            self._add(generation, texts[first : first + TEXTS_AT_ONCE])

    def _add(self, generation: int, texts: Sequence[LexicalText]) -> None:
        rows: list[int] = []
        words: list[str] = []
        frequencies: list[float] = []
        lengths: list[int] = []
        num_words = 0
        for one in texts:
            counted, length = weighted_terms(one)
            num_words += length
            rows += [one.row] * len(counted)
            lengths += [length] * len(counted)
            words += counted.keys()
            frequencies += counted.values()
        self._database.execute(
            f"INSERT INTO {postings_table(generation)} (word, row, frequency, length)"
            " SELECT (ts_lexize('ragcache_stems', word))[1] AS stem, row, sum(frequency), length"
            " FROM unnest(%s::text[], %s::bigint[], %s::real[], %s::integer[])"
            " AS one (word, row, frequency, length)"
            " WHERE ts_lexize('ragcache_stems', word) != '{}' GROUP BY stem, row, length",
            (words, BigintArray(rows), frequencies, lengths),
        )
        self._count(generation, num_words)

    @override
    def remove(self, generation: int, texts: Sequence[LexicalText]) -> None:
        counted = [(one.row, *weighted_terms(one)) for one in texts]
        self._database.execute(
            f"DELETE FROM {postings_table(generation)} AS postings USING ("
            " SELECT DISTINCT (ts_lexize('ragcache_stems', word))[1] AS stem, row"
            " FROM unnest(%s::text[], %s::bigint[]) AS one (word, row)) AS removed"
            " WHERE postings.word = removed.stem AND postings.row = removed.row",
            (
                [word for _, words, _ in counted for word in words],
                BigintArray([row for row, words, _ in counted for _ in words]),
            ),
        )
        self._count(generation, -sum(length for _, _, length in counted))

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
        if not terms or (allowed is not None and not len(allowed)):
            return []
        end_s = time.monotonic() + LIMIT_S

        def has_ended() -> bool:
            return time.monotonic() > end_s or (cancelled is not None and cancelled())

        try:
            with (
                self._database.snapshot() as connection,
                connection.cancelled_by(has_ended),
            ):
                # The server ends it, too, so that a retriever that hangs leaves nothing behind.
                connection.execute(f"SET LOCAL statement_timeout = {math.ceil(1000 * LIMIT_S)}")
                return self._hits(connection, generation, terms, limit, allowed)
        except Unavailable as error:
            if isinstance(error.__cause__, psycopg.errors.QueryCanceled):
                problem = f"a search by words has taken longer than {LIMIT_S:g} s, or was left"
                raise Unavailable("PostgreSQL", problem) from error
            raise

    def _hits(
        self,
        connection: Connection,
        generation: int,
        terms: Sequence[str],
        limit: int,
        allowed: Rows | None,
    ) -> list[LexicalHit]:
        sized = connection.execute(_ASKED, (list(terms), generation), binary=True).fetchone()
        if sized is None or not sized[0]:
            return []
        num_chunks, num_words, size_tokens, stems = sized
        table = postings_table(generation)
        count = _COUNT.format(table=table)

        def counts(words: Sequence[str]) -> Iterator[int]:
            for word in words:
                parameters = (word, most_counted(num_chunks))
                [(counted,)] = connection.execute(count, parameters, binary=True).fetchall()
                yield counted

        mean_length = num_words / num_chunks
        if allowed is None:
            frequencies = self._frequencies.of(generation, stems, num_chunks, counts)
        else:
            # The scores depend on no chunk that is not allowed, see allowed_scores.
            num_chunks, mean_length = len(allowed), float(size_tokens)
            counted = connection.execute(
                _COUNT_ALLOWED.format(table=table), (stems, BigintArray(allowed)), binary=True
            )
            frequencies = dict.fromkeys(stems, 0) | dict(counted.fetchall())
        choice = choose_words(frequencies, num_chunks)
        finding = [*choice.identifiers, *choice.finding]
        used = [*finding, *choice.scoring]
        num_found = sum(frequencies[word] for word in finding)
        read = [word for word in choice.scoring if frequencies[word] <= LOOKUP_COST * num_found]
        parameters = {
            "identifiers": list(choice.identifiers),
            "finding": finding,
            "read": read,
            "looked_up": [word for word in choice.scoring if word not in read],
            "words": used,
            "weights": [word_weight(frequencies[word], num_chunks) for word in used],
            "mean_length": mean_length,
            "limit": limit,
        }
        if allowed is not None:
            parameters["allowed"] = BigintArray(allowed)
        sql = _HITS.format(
            table=table,
            gain=SATURATION + 1,
            saturation=SATURATION,
            share=LENGTH_SHARE,
            rest=1 - LENGTH_SHARE,
            condition=""
            if allowed is None
            else "WHERE row IN (SELECT unnest(%(allowed)s::bigint[]))",
        )
        found = connection.execute(sql, parameters, binary=True).fetchall()
        return [LexicalHit(row, float(score), count) for row, score, count in found]

    def _count(self, generation: int, num_words: int) -> None:
        self._database.execute(
            "UPDATE generations SET num_words = num_words + %s WHERE row = %s",
            (num_words, generation),
        )


def weighted_terms(chunk: LexicalText) -> tuple[Counter[str], int]:
    """Return the weighted frequencies of a chunk's terms, and their number with repeats."""
    counted: Counter[str] = Counter()
    length = 0
    for weight, texts in (
        (TITLE_WEIGHT, [chunk.title]),
        (HEADINGS_WEIGHT, chunk.headings),
        (TEXT_WEIGHT, [chunk.text]),
    ):
        for text in texts:
            terms = terms_of(text)
            length += len(terms)
            for term in terms:
                counted[term] += weight  # type: ignore[assignment]
    return counted, length
