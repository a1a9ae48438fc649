"""How many chunks of a generation have a word, remembered for words that questions repeat."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

MAX_WORDS = 50_000
"""Words remembered of all generations, about 10 MB."""
MAX_CHANGE_SHARE = 0.1
"""A frequency is counted again after the number of chunks has changed by more than this share."""


class WordFrequencies:
    """The chunks that have each word. Any thread may call it."""

    def __init__(self, max_words: int = MAX_WORDS) -> None:
        self._max_words = max_words
        self._lock = threading.Lock()  # guards the one below
        # By generation and word: the frequency, and the chunks of the generation at that time.
        self._known: OrderedDict[tuple[int, str], tuple[int, int]] = OrderedDict()

    def of(
        self,
        generation: int,
        words: Sequence[str],
        num_chunks: int,
        count: Callable[[Sequence[str]], Iterable[int]],
    ) -> dict[str, int]:
        """Return how many chunks have each word.

        Args:
            num_chunks: Chunks of the generation.
            count: Counts the chunks with each of some words, in order. If it fails, the words that
                it has counted are remembered nevertheless.
        """
        found: dict[str, int] = {}
        with self._lock:
            for word in words:
                frequency, chunks_then = self._known.get((generation, word), (0, -1))
                if abs(num_chunks - chunks_then) <= MAX_CHANGE_SHARE * chunks_then:
                    self._known.move_to_end((generation, word))
                    found[word] = frequency
        missing = [word for word in words if word not in found]
        if missing:
            for word, frequency in zip(missing, count(missing), strict=True):
                found[word] = frequency
                self._remember(generation, word, frequency, num_chunks)
        return found

    def _remember(self, generation: int, word: str, frequency: int, num_chunks: int) -> None:
        with self._lock:
            self._known[generation, word] = (frequency, num_chunks)
            self._known.move_to_end((generation, word))
            while len(self._known) > self._max_words:
                self._known.popitem(last=False)


def most_counted(num_chunks: int) -> int:
    """Return the number of chunks with a word up to which they are counted.

    A word that more than half of the chunks have gets the least weight in any case.
    """
    return num_chunks // 2 + 1
