"""Features say what their names promise, for any texts and any legs."""

from __future__ import annotations

import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.retrieval.fusion import Candidates, FusionWeights, fused_scores
from ragcache_core.retrieval.lexical.term_matches import find_terms, stem_of
from ragcache_core.retrieval.rank_features import FEATURE_NAMES, CandidateText, rank_features

ALPHABET = "ab İéß12 .\n"
texts = st.text(ALPHABET, max_size=60)
words = st.lists(st.text("abé12", min_size=1, max_size=4), max_size=6, unique=True)


def features_of(
    question: list[str], some: list[CandidateText], seed: int = 0
) -> dict[str, list[float]]:
    random = np.random.default_rng(seed)
    count = len(some)
    dense = random.random(count)
    lexical = np.where(random.random(count) < 0.5, np.nan, 9 * random.random(count))
    ranks = np.arange(1, count + 1)
    candidates = Candidates(
        ranks.copy(), dense, lexical, ranks, np.where(np.isnan(lexical), 0, ranks)
    )
    vectors = random.normal(size=(count, 4)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True) if count else 1.0
    fused = fused_scores(candidates, FusionWeights())
    found = rank_features(question, candidates, fused, some, vectors)
    assert found.shape == (count, len(FEATURE_NAMES))
    assert np.isfinite(found).all()
    return dict(zip(FEATURE_NAMES, found.T.tolist(), strict=True))


@given(words, st.lists(st.tuples(texts, texts), max_size=6), st.integers(0, 99))
def test_features_are_finite_and_shares_are_shares(
    question: list[str], some: list[tuple[str, str]], seed: int
) -> None:
    found = features_of(question, [CandidateText(*one) for one in some], seed)
    for name, column in found.items():
        if name.endswith(("_share", "coverage")):
            assert all(-1e-9 <= value <= 1 + 1e-9 for value in column), name


@given(words, st.lists(texts, max_size=5))
def test_terms_are_found_where_words_begin_with_them(stems: list[str], some: list[str]) -> None:
    matches = find_terms(stems, some)
    found = set(
        zip(matches.texts.tolist(), matches.terms.tolist(), matches.positions.tolist(), strict=True)
    )
    expected = {
        (i, j, hit.start())
        for i, text in enumerate(some)
        for j, stem in enumerate(stems)
        for hit in re.finditer(rf"(?<![^\W_])(?={re.escape(stem)})", text.lower())
    }
    assert found == expected
    assert list(zip(matches.texts, matches.positions, strict=True)) == sorted(
        zip(matches.texts, matches.positions, strict=True)
    )


@given(st.text("abcdeginrst", min_size=1, max_size=12))
def test_a_stem_begins_its_word(word: str) -> None:
    assert word.startswith(stem_of(word))
    assert len(stem_of(word)) >= min(4, len(word))


def test_forms_of_a_word_are_found() -> None:
    found = features_of(["searches"], [CandidateText("", "it searched"), CandidateText("", "no")])
    assert found["coverage"] == [1.0, 0.0]


def test_neighbouring_words_are_a_pair() -> None:
    some = [CandidateText("", text) for text in ("the disk cache", "a cache on a disk", "disk")]
    found = features_of(["disk", "cache"], some)
    assert found["pair_coverage"] == [1.0, 0.0, 0.0]


def test_words_in_one_window_count_more() -> None:
    near = "disk and cache" + 400 * " x"
    far = "disk" + 400 * " x" + " cache"
    found = features_of(["disk", "cache"], [CandidateText("", near), CandidateText("", far)])
    assert found["window_coverage"][0] > found["window_coverage"][1] > 0


def test_titles_and_numbers_count() -> None:
    some = [CandidateText("disk 7", ""), CandidateText("", "disk 7"), CandidateText("", "disk 70")]
    found = features_of(["disk", "7"], some)
    assert found["title_coverage"] == [1.0, 0.0, 0.0]
    assert found["number_coverage"] == [0.0, 1.0, 1.0]
