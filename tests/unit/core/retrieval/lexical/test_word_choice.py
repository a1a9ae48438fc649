"""Rare words find chunks, and frequent ones are left to scores when they matter less."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.retrieval.lexical.word_choice import (
    MAX_CANDIDATES,
    MAX_REST_SHARE,
    MIN_CANDIDATES,
    choose_words,
    word_weight,
)

NUM_CHUNKS = 1_000_000
frequencies = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=4), st.integers(0, NUM_CHUNKS), max_size=12
)


@given(frequencies)
def test_the_finding_words_are_the_rarest(found: dict[str, int]) -> None:
    choice = choose_words(found, NUM_CHUNKS)
    both = (*choice.finding, *choice.scoring)
    assert len(set(both)) == len(both)
    assert [found[word] for word in both] == sorted(found[word] for word in both)
    left_out = found.keys() - set(both)
    assert all(found[word] > NUM_CHUNKS / 2 for word in left_out)


@given(frequencies)
def test_enough_chunks_are_found_before_a_word_only_scores(found: dict[str, int]) -> None:
    choice = choose_words(found, NUM_CHUNKS)
    if len(choice.finding) < len(found):
        num_found = sum(found[word] for word in choice.finding)
        assert num_found >= MIN_CANDIDATES


@given(frequencies)
def test_words_that_only_score_have_the_smaller_share_of_weight_unless_too_many_are_found(
    found: dict[str, int],
) -> None:
    choice = choose_words(found, NUM_CHUNKS)
    weights = {
        word: word_weight(count, NUM_CHUNKS) if count else 0.0 for word, count in found.items()
    }
    rest = sum(weights[word] for word in found if word not in choice.finding)
    if rest > MAX_REST_SHARE * sum(weights.values()) + 1e-9:
        following = min(found[word] for word in found if word not in choice.finding)
        assert sum(found[word] for word in choice.finding) + following > MAX_CANDIDATES


@given(frequencies)
def test_a_word_that_no_chunk_has_yet_still_finds_chunks(found: dict[str, int]) -> None:
    choice = choose_words(found, NUM_CHUNKS)
    assert {word for word, count in found.items() if count == 0} <= set(choice.finding)


def test_all_words_find_chunks_in_a_small_collection() -> None:
    choice = choose_words({"rare": 1, "frequent": 600, "everywhere": 900}, 900)
    assert choice.finding == ("rare", "frequent", "everywhere")
    assert choice.scoring == ()


def test_a_word_of_most_chunks_does_not_even_score() -> None:
    choice = choose_words({"rare": 5_000, "frequent": 90_000, "everywhere": 600_000}, NUM_CHUNKS)
    assert choice.finding == ("rare",)
    assert choice.scoring == ("frequent",)


def test_identifiers_find_chunks_however_rare_the_words_are() -> None:
    found = {"rare": 5_000, "3.11.7=": 9_000, "c++=": 40, "frequent": 90_000}
    choice = choose_words(found, NUM_CHUNKS)
    assert choice.identifiers == ("c++=", "3.11.7=")
    assert choice.finding == ("rare",)
    assert choice.scoring == ("frequent",)


@pytest.mark.parametrize(
    ("found", "num_chunks"),
    [({"3.11.7=": MAX_CANDIDATES + 1}, NUM_CHUNKS), ({"3.11.7=": 6}, 10), ({"5km=": 2}, 10)],
    ids=["too many chunks", "most chunks", "an amount"],
)
def test_an_identifier_that_tells_little_is_a_word(found: dict[str, int], num_chunks: int) -> None:
    choice = choose_words(found, num_chunks)
    assert choice.identifiers == ()
    assert choice.finding == tuple(found)


@pytest.mark.parametrize("frequency", [0, 1, 10, 11])
def test_a_frequency_that_is_out_of_date_has_a_weight(frequency: int) -> None:
    assert word_weight(frequency, 10) > 0.0
