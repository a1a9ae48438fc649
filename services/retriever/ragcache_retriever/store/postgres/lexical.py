"""The lexical leg in PostgreSQL: BM25 over tables of words.

PostgreSQL's own ranking of text knows no inverse document frequency. So each generation has a table
with the stems of its chunks, how often each has it, and the length of the chunk. The score is that
of SQLite's FTS5, whose words are the same but for some rare ones.

Source: Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009, section 3.4.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ragcache_retriever.store.postgres.connections.binary_types import BigintArray
from ragcache_retriever.store.postgres.connections.database import PostgresDatabase
from ragcache_retriever.store.postgres.schema import postings_table
from ragcache_retriever.store.records import LexicalHit, Rows

TITLE_WEIGHT = 2.0
HEADINGS_WEIGHT = 1.5
TEXT_WEIGHT = 1.0
SATURATION, LENGTH_SHARE = 1.2, 0.75
"""k1 and b of BM25, as in FTS5."""

MAX_WORD_CHARACTERS = 256
"""Longer words are cut. PostgreSQL's index takes words of up to a third of a page."""

_WORD = re.compile(r"[^\W_]+")
_HITS = """
WITH found AS MATERIALIZED (
    SELECT postings.word, postings.row, postings.frequency, postings.length
    FROM {table} AS postings WHERE postings.word IN (
        SELECT (ts_lexize('ragcache_stems', word))[1] FROM unnest(%(words)s::text[]) AS word)
), size AS (
    SELECT num_chunks, num_words / greatest(num_chunks, 1)::double precision AS mean_length
    FROM generations WHERE row = %(generation)s
), weights AS (
    SELECT word, greatest(1e-6, ln((num_chunks - count(*) + 0.5) / (count(*) + 0.5))) AS weight
    FROM found, size GROUP BY word, num_chunks
)
SELECT found.row, sum(weight * frequency * {gain}
    / (frequency + {saturation} * ({rest} + {share} * length / mean_length))) AS score
FROM found JOIN weights USING (word), size {condition}
GROUP BY found.row ORDER BY score DESC, found.row LIMIT %(limit)s
"""


@dataclass(frozen=True, slots=True)
class LexicalText:
    """The text of a chunk that is searched by words."""

    row: int
    title: str
    headings: Sequence[str]
    text: str


class PostgresLexical:
    """Tables of words. Changes need a transaction."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database

    def add(self, generation: int, texts: Iterable[LexicalText]) -> None:
        """Add the words of chunks."""
        rows: list[int] = []
        words: list[str] = []
        frequencies: list[float] = []
        lengths: list[int] = []
        num_words = 0
        for one in texts:
            counted, length = weighted_words(one)
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

    def remove(self, generation: int, texts: Sequence[LexicalText]) -> None:
        """Remove the words of chunks, which have the same texts as when they were added."""
        counted = [(one.row, *weighted_words(one)) for one in texts]
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

    def hits(
        self, generation: int, words: Sequence[str], limit: int, allowed: Rows | None
    ) -> list[LexicalHit]:
        """See DocumentStore.lexical_hits. Any thread may call it."""
        asked = [one for word in words for one in words_of(word)]
        if not asked or (allowed is not None and not len(allowed)):
            return []
        sql = _HITS.format(
            table=postings_table(generation),
            gain=SATURATION + 1,
            saturation=SATURATION,
            share=LENGTH_SHARE,
            rest=1 - LENGTH_SHARE,
            condition="" if allowed is None else "WHERE found.row = ANY(%(allowed)s)",
        )
        parameters = {"words": asked, "generation": generation, "limit": limit}
        if allowed is not None:
            parameters["allowed"] = BigintArray(allowed)
        with self._database.connection() as connection:
            found = connection.execute(sql, parameters, binary=True).fetchall()
        return [LexicalHit(row, float(score)) for row, score in found]

    def _count(self, generation: int, num_words: int) -> None:
        self._database.execute(
            "UPDATE generations SET num_words = num_words + %s WHERE row = %s",
            (num_words, generation),
        )


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case and without accents."""
    decomposed = unicodedata.normalize("NFKD", text)
    plain = "".join(one for one in decomposed if not unicodedata.combining(one))
    return [word[:MAX_WORD_CHARACTERS] for word in _WORD.findall(plain.lower())]


def weighted_words(chunk: LexicalText) -> tuple[Counter[str], int]:
    """Return the weighted frequencies of a chunk's words, and their number with repeats."""
    counted: Counter[str] = Counter()
    length = 0
    for weight, texts in (
        (TITLE_WEIGHT, [chunk.title]),
        (HEADINGS_WEIGHT, chunk.headings),
        (TEXT_WEIGHT, [chunk.text]),
    ):
        for text in texts:
            words = words_of(text)
            length += len(words)
            for word in words:
                counted[word] += weight  # type: ignore[assignment]
    return counted, length
