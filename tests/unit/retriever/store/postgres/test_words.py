"""Words of texts, as the lexical leg of PostgreSQL counts them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_retriever.store.generation_tables import LexicalText
from ragcache_retriever.store.postgres.lexical import (
    HEADINGS_WEIGHT,
    MAX_WORD_CHARACTERS,
    TITLE_WEIGHT,
    weighted_words,
    words_of,
)


def test_words_have_no_case_accents_or_marks() -> None:
    assert words_of("Über-Größe: l'été, x_1 (naïve)") == [
        "uber", "große", "l", "ete", "x", "1", "naive",
    ]  # fmt: skip


@given(text=st.text())
def test_words_can_be_stored_and_stay_words(text: str) -> None:
    for word in words_of(text):
        assert 0 < len(word) <= MAX_WORD_CHARACTERS
        assert "\0" not in word


def test_titles_and_headings_weigh_more() -> None:
    counted, length = weighted_words(LexicalText(1, "Cat", ("Cat", "dogs"), "cat cat"))
    assert counted == {"cat": TITLE_WEIGHT + HEADINGS_WEIGHT + 2, "dogs": HEADINGS_WEIGHT}
    assert length == 5
