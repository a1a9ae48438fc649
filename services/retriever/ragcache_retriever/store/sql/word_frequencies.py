"""How many chunks of a generation have a word, remembered for words that questions repeat."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from ragcache_retriever.store.sqlite.database import Database
from ragcache_retriever.store.sqlite.schema import lexical_table

MAX_WORDS = 50_000
"""Words remembered of all generations, about 10 MB."""
MAX_CHANGE_SHARE = 0.1
"""A frequency is counted again after the number of chunks has changed by more than this share."""


class WordFrequencies:
    """Counts the chunks with a word by FTS5. Any thread may call it."""

    def __init__(self, database: Database, max_words: int = MAX_WORDS) -> None:
        self._database = database
        self._max_words = max_words
        self._lock = threading.Lock()  # guards the one below
        # By generation and word: the frequency, and the chunks of the generation at that time.
        self._known: OrderedDict[tuple[int, str], tuple[int, int]] = OrderedDict()

    def of(
        self, generation: int, phrases: Mapping[str, str], num_chunks: int, limit_s: float
    ) -> dict[str, int]:
        """Return how many chunks have each word.

        A word that more than half of the chunks have counts as one that half and one more have.

        Args:
            phrases: The FTS5 query of each word.
            num_chunks: Chunks of the generation.
            limit_s: Longest time to count.

        Raises:
            Unavailable: Counting has taken longer.
        """
        found: dict[str, int] = {}
        with self._lock:
            for word in phrases:
                frequency, chunks_then = self._known.get((generation, word), (0, -1))
                if abs(num_chunks - chunks_then) <= MAX_CHANGE_SHARE * chunks_then:
                    self._known.move_to_end((generation, word))
                    found[word] = frequency
        missing = [word for word in phrases if word not in found]
        if missing:
            counted = self._counted(
                generation, [phrases[word] for word in missing], num_chunks, limit_s
            )
            found |= zip(missing, counted, strict=True)
            self._remember(generation, {word: found[word] for word in missing}, num_chunks)
        return found

    def _counted(
        self, generation: int, phrases: Sequence[str], num_chunks: int, limit_s: float
    ) -> list[int]:
        table = lexical_table(generation)
        rows = self._database.iterate(
            "SELECT (SELECT count(*) FROM"
            f" (SELECT 1 FROM {table} WHERE {table} MATCH phrases.value LIMIT ?))"
            " FROM json_each(?) AS phrases ORDER BY phrases.key",
            (num_chunks // 2 + 1, json.dumps(phrases)),
            limit_s=limit_s,
        )
        return [count for (count,) in rows]

    def _remember(self, generation: int, frequencies: Mapping[str, int], num_chunks: int) -> None:
        with self._lock:
            for word, frequency in frequencies.items():
                self._known[generation, word] = (frequency, num_chunks)
                self._known.move_to_end((generation, word))
            while len(self._known) > self._max_words:
                self._known.popitem(last=False)
