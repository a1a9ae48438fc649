"""Features of a search's candidates. The bundled ranker orders candidates by them.

No feature depends on the size of the collection or the scale of a leg's scores. So trees that were
trained on one collection serve others. More of a feature never means less relevant, and the trees
may only rank higher with it. Features without such a direction, such as a text's length, fitted
the training collection and lost on others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ragcache_core.retrieval.fusion import Candidates, share_of_best
from ragcache_core.retrieval.lexical.term_matches import TermMatches, find_terms, stem_of

Scores = npt.NDArray[np.float64]
Features = npt.NDArray[np.float64]
Vectors = npt.NDArray[np.float32]

FEATURE_NAMES: Final = (
    "dense_share",
    "dense_deviation",
    "dense_nearness",
    "lexical_share",
    "lexical_deviation",
    "lexical_nearness",
    "fused_share",
    "fused_nearness",
    "coverage",
    "weighted_coverage",
    "weighted_frequency",
    "pair_coverage",
    "window_coverage",
    "match_earliness",
    "title_coverage",
    "number_coverage",
    "centroid_similarity",
    "neighbour_similarity",
)

MAX_TERMS = 24
WINDOW_CHARS = 160
"""About 25 words."""
CENTROID_HITS = 3
_PAIR_CHARS = 10
"""Most characters between the end of a stem and the next word of the question."""
_SATURATION = 1.2


@dataclass(frozen=True, slots=True)
class CandidateText:
    """The text of a candidate. ``heading``: its title and headings."""

    heading: str
    text: str


def rank_features(
    words: Sequence[str],
    candidates: Candidates,
    fused: Scores,
    texts: Sequence[CandidateText],
    vectors: Vectors,
) -> Features:
    """Return the features of the candidates, in the order of FEATURE_NAMES.

    Args:
        words: Of the question, in lower case.
        candidates: Best fused score first.
        fused: Their fused scores, shape (n,).
        texts: Their texts.
        vectors: Their embeddings of length 1, shape (n, dimension). A row of zeros: not known.

    Returns:
        Shape (n, len(FEATURE_NAMES)), finite.
    """
    count = len(fused)
    words = list(words)[:MAX_TERMS]
    columns = [
        *_leg_columns(candidates.dense, candidates.dense_ranks),
        *_leg_columns(candidates.lexical, candidates.lexical_ranks),
        share_of_best(fused),
        _nearness(np.arange(1, count + 1)),
        *_text_columns(words, texts),
        *_vector_columns(vectors),
    ]
    return np.stack(columns, axis=1)


def _leg_columns(scores: Scores, ranks: npt.NDArray[np.int64]) -> tuple[Scores, Scores, Scores]:
    """Return share of the best score, deviation from the mean, and nearness of a leg."""
    known = scores[~np.isnan(scores)]
    deviation = np.zeros(len(scores))
    if len(known) and known.std() > 0.0:
        filled = np.where(np.isnan(scores), known.min(), scores)
        deviation = (filled - known.mean()) / known.std()
    ranked = np.where(ranks > 0, ranks, 2 * max(len(scores), int(ranks.max(initial=0))))
    return share_of_best(scores), deviation, _nearness(ranked)


def _nearness(ranks: npt.NDArray[np.int64]) -> Scores:
    """Return how near ranks are to the first one: 0 for the first, negative for others."""
    return -np.log2(ranks)


# Words


def _text_columns(words: Sequence[str], texts: Sequence[CandidateText]) -> list[Scores]:
    stems = [stem_of(word) for word in words]
    matches = find_terms(stems, [one.text for one in texts])
    frequencies = _frequencies(matches, len(texts), len(words))
    present = frequencies > 0
    weights = _term_weights(present)
    headings = [one.heading for one in texts]
    in_heading = _frequencies(find_terms(stems, headings), len(texts), len(words)) > 0
    numbers = np.array([any(map(str.isdigit, word)) for word in words], bool)
    return [
        present.mean(axis=1) if len(words) else np.zeros(len(texts)),
        present @ weights,
        (frequencies / (frequencies + _SATURATION)) @ weights,
        _pair_coverage(matches, stems, weights, len(texts)),
        _window_coverage(matches, weights, len(texts)),
        _match_earliness(matches, len(texts)),
        in_heading @ weights,
        present[:, numbers].mean(axis=1) if numbers.any() else np.ones(len(texts)),
    ]


def _frequencies(matches: TermMatches, num_texts: int, num_terms: int) -> Scores:
    """Return how often each term occurs in each text, shape (texts, terms)."""
    flat = np.bincount(matches.texts * num_terms + matches.terms, minlength=num_texts * num_terms)
    return flat.reshape(num_texts, num_terms).astype(np.float64)


def _term_weights(present: npt.NDArray[np.bool_]) -> Scores:
    """Return weights of terms whose sum is 1. Terms that few candidates have count more."""
    num_texts = len(present)
    weights = np.log1p(num_texts / (0.5 + present.sum(axis=0)))
    total = weights.sum()
    normalised: Scores = weights / total if total else weights
    return normalised


def _pair_coverage(
    matches: TermMatches, stems: Sequence[str], weights: Scores, num_texts: int
) -> Scores:
    """Return the weighted share of neighbouring words of the question that are neighbours, too."""
    num_pairs = len(stems) - 1
    if num_pairs < 1:
        return np.zeros(num_texts)
    lengths = np.array([len(stem) for stem in stems])
    gap = np.diff(matches.positions) - lengths[matches.terms[:-1]]
    is_pair = (
        (np.diff(matches.terms) == 1)
        & (np.diff(matches.texts) == 0)
        & (gap >= 0)
        & (gap <= _PAIR_CHARS)
    )
    found = np.zeros((num_texts, num_pairs), bool)
    found[matches.texts[:-1][is_pair], matches.terms[:-1][is_pair]] = True
    pair_weights = weights[:-1] + weights[1:]
    covered: Scores = found @ pair_weights / pair_weights.sum()
    return covered


def _window_coverage(matches: TermMatches, weights: Scores, num_texts: int) -> Scores:
    """Return the highest weight of the terms in one window of a text."""
    if not len(matches.texts) or not len(weights):
        return np.zeros(num_texts)
    best = np.zeros(num_texts)
    for shift in (0, WINDOW_CHARS // 2):
        windows = (matches.positions + shift) // WINDOW_CHARS
        num_windows = int(windows.max()) + 1
        flat = (matches.texts * num_windows + windows) * len(weights) + matches.terms
        distinct = np.unique(flat)
        totals = np.bincount(
            distinct // len(weights),
            weights[distinct % len(weights)],
            minlength=num_texts * num_windows,
        )
        best = np.maximum(best, totals.reshape(num_texts, num_windows).max(axis=1))
    return best


def _match_earliness(matches: TermMatches, num_texts: int) -> Scores:
    """Return how early the first match is: 0 at the beginning, else negative and logarithmic."""
    first = np.full(num_texts, 1e4)
    np.minimum.at(first, matches.texts, matches.positions.astype(np.float64))
    earliness: Scores = -np.log1p(first)
    return earliness


# Embeddings


def _vector_columns(vectors: Vectors) -> tuple[Scores, Scores]:
    """Return the similarity to the mean of the best hits, and to the nearest of them.

    What is similar to other good hits is likely to be relevant, too. A hit is not compared with
    itself.
    """
    count = len(vectors)
    if count < 2:
        return np.zeros(count), np.zeros(count)
    best = vectors[:CENTROID_HITS]
    similarity = (vectors @ best.T).astype(np.float64)
    own = np.arange(len(best))
    others = np.full(count, float(len(best)))
    others[own] -= 1
    without_self = similarity.copy()
    without_self[own, own] = 0.0
    centroid = without_self.sum(axis=1) / np.maximum(others, 1.0)
    without_self[own, own] = -1.0
    return centroid, without_self.max(axis=1)
