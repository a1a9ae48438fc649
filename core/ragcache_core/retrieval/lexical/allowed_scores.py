"""BM25 of the chunks that a filter allows, from these chunks alone.

The usual weight of a word and the usual mean length follow from all chunks. Then a score tells how
many chunks that the caller may not read have a word. Here both follow from allowed chunks, and the
lengths are compared with the size to which the collection is split.

Source: Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009, section 3.4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ragcache_core.retrieval.lexical.word_choice import choose_words, word_weight

SATURATION: Final = 1.2
LENGTH_SHARE: Final = 0.75
"""k1 and b of BM25, as in SQLite's FTS5."""

MIN_RANKED: Final = 1_000
"""Chunks whose lengths are read, at least. The others have lower scores without their lengths."""

Floats = NDArray[np.float64]
Indexes = NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class WordUse:
    """The allowed chunks that have a word.

    Attributes:
        indexes: Of the chunks, sorted, shape (n,).
        frequencies: Weighted frequencies of the word in them, shape (n,).
    """

    indexes: Indexes
    frequencies: Floats

    @classmethod
    def of(cls, indexes: Indexes, weights: Floats) -> WordUse:
        """Count the weights of single uses, given in any order."""
        found, inverse = np.unique(indexes, return_inverse=True)
        return cls(found, np.bincount(inverse, weights, len(found)).astype(np.float64))

    def within(self, chunks: Indexes) -> Floats:
        """Return the frequency in each of some chunks, which are sorted."""
        found = np.zeros(len(chunks))
        if len(chunks):
            at = np.minimum(np.searchsorted(chunks, self.indexes), len(chunks) - 1)
            are_there = chunks[at] == self.indexes
            found[at[are_there]] = self.frequencies[are_there]
        return found


def allowed_scores(
    uses: Mapping[str, WordUse],
    num_allowed: int,
    limit: int,
    usual_length: float,
    lengths_of: Callable[[Indexes], Floats],
) -> list[tuple[int, float, int]]:
    """Return the best chunks: index, score and number of identifiers, best first; ties by index.

    Args:
        uses: By word of the question.
        usual_length: Length at which a chunk is neither favoured nor disfavoured, above 0.
        lengths_of: Returns the lengths of chunks, given by index.
    """
    counts = {word: len(use.indexes) for word, use in uses.items()}
    choice = choose_words(counts, num_allowed)
    finding = (*choice.identifiers, *choice.finding)
    weights = {word: word_weight(counts[word], num_allowed) for word in (*finding, *choice.scoring)}

    def best(chunks: Indexes, lengths: Floats, most: int) -> list[tuple[int, float, int]]:
        saturation = SATURATION * (1 - LENGTH_SHARE + LENGTH_SHARE * lengths / usual_length)
        scores = np.zeros(len(chunks))
        num_identifiers = np.zeros(len(chunks), np.int64)
        for word, weight in weights.items():
            found = uses[word].within(chunks)
            scores += weight * found * (SATURATION + 1) / (found + saturation)
            if word in choice.identifiers:
                num_identifiers += found > 0
        order = np.lexsort((chunks, -scores, -num_identifiers))[:most]
        return [(int(chunks[i]), float(scores[i]), int(num_identifiers[i])) for i in order]

    if not finding:
        return []
    candidates = np.unique(np.concatenate([uses[word].indexes for word in finding]))
    usual = np.full(len(candidates), usual_length)
    ranked = best(candidates, usual, max(MIN_RANKED, 4 * limit))
    chunks = np.array(sorted(index for index, *_ in ranked), np.intp)
    return best(chunks, lengths_of(chunks), limit)
