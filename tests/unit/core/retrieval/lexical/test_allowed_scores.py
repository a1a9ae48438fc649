"""BM25 of the chunks that a filter allows."""

from __future__ import annotations

import numpy as np
import pytest

from ragcache_core.retrieval.lexical import allowed_scores as module
from ragcache_core.retrieval.lexical.allowed_scores import Floats, Indexes, WordUse, allowed_scores
from ragcache_core.retrieval.lexical.terms import terms_of


def uses(**found: list[float]) -> dict[str, WordUse]:
    """Return the uses of words, given by their frequency in each chunk."""
    return {word: use_of(given) for word, given in found.items()}


def use_of(given: list[float]) -> WordUse:
    frequencies = np.array(given, np.float64)
    (indexes,) = np.nonzero(frequencies)
    return WordUse(indexes, frequencies[indexes])


def short(indexes: Indexes) -> Floats:
    return np.full(len(indexes), 10.0)


def test_uses_are_counted_by_chunk() -> None:
    use = WordUse.of(np.array([7, 2, 7]), np.array([1.0, 1.0, 2.0]))
    assert use.indexes.tolist() == [2, 7]
    assert use.within(np.array([1, 2, 7, 9])).tolist() == [0, 1, 3, 0]
    assert use.within(np.array([3])).tolist() == [0]


def test_rare_words_count_more_than_frequent_ones() -> None:
    found = uses(rare=[1, 0, 0, 0, 0, 0, 0], usual=[0, 1, 1, 0, 0, 0, 0])
    hits = allowed_scores(found, 7, 10, 10.0, short)
    assert [index for index, *_ in hits] == [0, 1, 2]
    assert hits[1][1] == hits[2][1] < hits[0][1]


def test_short_chunks_come_before_long_ones() -> None:
    found = uses(word=[1, 1, 0, 0, 0])
    hits = allowed_scores(found, 5, 10, 10.0, lambda indexes: np.array([40.0, 5.0])[indexes])
    assert [index for index, *_ in hits] == [1, 0]


def test_identifiers_come_first() -> None:
    [identifier] = terms_of("F0815")
    found = uses(word=[3, 0, 0, 0]) | {identifier: use_of([0, 0, 1, 0])}
    hits = allowed_scores(found, 4, 10, 10.0, short)
    assert [(index, number) for index, _, number in hits] == [(2, 1), (0, 0)]


def test_the_limit_keeps_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_RANKED", 1)
    found = uses(word=[float(i % 7) for i in range(100)])
    hits = allowed_scores(found, 100, 3, 10.0, short)
    assert [index for index, *_ in hits] == [6, 13, 20]
    assert allowed_scores({}, 0, 3, 10.0, short) == []
    assert allowed_scores(uses(word=[0, 0]), 2, 3, 10.0, short) == []
