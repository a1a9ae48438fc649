"""Terms of chunks, as the lexical leg of PostgreSQL counts them."""

from __future__ import annotations

from ragcache_retriever.search.lexical import HEADINGS_WEIGHT, TITLE_WEIGHT
from ragcache_retriever.store.generation_tables import LexicalText
from ragcache_retriever.store.postgres.lexical import weighted_terms


def test_titles_and_headings_have_weights_of_their_own() -> None:
    counted, length = weighted_terms(LexicalText(1, "Cat", ("Cat", "dogs"), "cat cat v2"))
    assert counted == {
        "cat": TITLE_WEIGHT + HEADINGS_WEIGHT + 2, "dogs": HEADINGS_WEIGHT, "v2=": 1,
    }  # fmt: skip
    assert length == 6
