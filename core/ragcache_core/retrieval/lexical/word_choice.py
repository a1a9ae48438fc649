"""Chooses which terms of a question find chunks, and which only add to their scores.

BM25 takes time for each chunk that has one of the words. The frequent words find most of these
chunks, and give each of them little. So the rare words find the chunks, and the frequent ones are
counted in these only. Identifiers find chunks, too, because the chunks that have them come first.

Source: Turtle and Flood, Query evaluation: strategies and optimizations (1995). Their max_score
leaves out documents that cannot reach the best scores without a rare word. That rule is exact. This
one is not: it stops at a share of the possible score, because the exact bound is rarely reached.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ragcache_core.retrieval.lexical.terms import is_identifier

MIN_CANDIDATES = 1_000
"""Chunks that the finding words have at least, counted by word, where there are so many."""
MAX_CANDIDATES = 20_000
"""Chunks above which no word is added to those that find, unless MIN_CANDIDATES asks for it."""
MAX_REST_SHARE = 0.4
"""The words that only add to scores have at most this share of all weight."""
_LEAST_WEIGHT = 1e-6
"""Weight of a word that half of the chunks have, as in SQLite's FTS5."""


@dataclass(frozen=True, slots=True)
class WordChoice:
    """Terms of a question, the identifiers first, then the rarest.

    Attributes:
        identifiers: They find chunks, and a chunk with more of them comes first. One that most
            chunks have is a word as any other.
        finding: A chunk has to have one of them or of the identifiers.
        scoring: They add to the scores of chunks that are found. Words without weight are left out.
    """

    identifiers: tuple[str, ...]
    finding: tuple[str, ...]
    scoring: tuple[str, ...]


def choose_words(frequencies: Mapping[str, int], num_chunks: int) -> WordChoice:
    """Divide the words of a question.

    Args:
        frequencies: By word, the chunks that have it. It may be somewhat out of date. A word that
            no chunk has finds the chunks that were added since.
        num_chunks: All chunks that may be found.
    """
    words = sorted(frequencies, key=lambda word: (frequencies[word], word))
    most = min(MAX_CANDIDATES, num_chunks // 2)
    identifiers = [
        word for word in words if is_identifier(word) and frequencies[word] <= max(1, most)
    ]
    words = [word for word in words if word not in identifiers]
    # A word that no chunk has adds to no score.
    weights = [
        word_weight(frequencies[word], num_chunks) if frequencies[word] else 0.0 for word in words
    ]
    rest = sum(weights)
    max_rest = MAX_REST_SHARE * rest
    num_candidates = sum(frequencies[word] for word in identifiers)
    for i, word in enumerate(words):
        is_enough = num_candidates >= MIN_CANDIDATES
        is_too_many = num_candidates + frequencies[word] > MAX_CANDIDATES
        if is_enough and (rest <= max_rest or is_too_many):
            scoring = [later for later in words[i:] if frequencies[later] <= num_chunks / 2]
            return WordChoice(tuple(identifiers), tuple(words[:i]), tuple(scoring))
        num_candidates += frequencies[word]
        rest -= weights[i]
    return WordChoice(tuple(identifiers), tuple(words), ())


def word_weight(frequency: int, num_chunks: int) -> float:
    """Return the weight of a word in BM25, its inverse document frequency.

    Source: Robertson and Zaragoza, The Probabilistic Relevance Framework (2009), section 3.4.
    """
    others = max(0, num_chunks - frequency)
    weight = math.log((others + 0.5) / (frequency + 0.5))
    return max(_LEAST_WEIGHT, weight)
