"""Which text supports a sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.citations.support import SupportIndex

PUMPS = (
    "The pump P-12 costs 36 euros. It is made in Oslo.\n"
    "Its filter has to be replaced after 400 hours of operation."
)
BILLING = "Billing runs in the region eu-north-1. Support answers on the second floor."
SOURCES = [PUMPS, BILLING]
INDEX = SupportIndex(SOURCES)


def part(sentence: str, index: SupportIndex = INDEX, sources: list[str] = SOURCES) -> str | None:
    found = index.find(sentence)
    return None if found is None else sources[found.source][found.start : found.end]


@pytest.mark.parametrize(
    ("sentence", "support"),
    [
        ("P-12 costs 36 euros.", "The pump P-12 costs 36 euros."),
        ("36 euros", "The pump P-12 costs 36 euros."),
        ("It runs in eu-north-1.", "Billing runs in the region eu-north-1."),
        (
            "Replace the filter every 400 operating hours.",
            "Its filter has to be replaced after 400 hours of operation.",
        ),
        (
            "The pump P-12, made in Oslo, costs 36 euros.",
            "The pump P-12 costs 36 euros. It is made in Oslo.",
        ),
    ],
)
def test_a_sentence_is_supported_by_the_part_that_shares_its_words(
    sentence: str, support: str
) -> None:
    assert part(sentence) == support


@pytest.mark.parametrize(
    "sentence",
    [
        "P-12 costs 63 euros.",  # another number
        "The pump P-13 costs 36 euros.",  # another name
        "The pump P-12 does not cost 36 euros.",
        "I do not know where billing runs.",
        "The documents do not say who made it.",
        "Yes.",
        "It is in the.",
        "",
        "…",
    ],
)
def test_a_sentence_that_says_something_else_has_no_support(sentence: str) -> None:
    assert part(sentence) is None


def test_a_sentence_that_leaves_out_a_not_has_no_support() -> None:
    sources = ["Refunds are never paid in cash."]
    index = SupportIndex(sources)
    assert part("Refunds are paid in cash.", index, sources) is None
    assert part("Refunds are not paid in cash.", index, sources) == sources[0]


def test_words_of_languages_without_spaces_are_found() -> None:
    sources = ["東京は日本の首都です。人口は約1400万人です。", "大阪は商業の都市です。"]
    assert (
        part("日本の首都は東京です。", SupportIndex(sources), sources) == "東京は日本の首都です。"
    )


def test_of_equal_supports_the_first_source_is_taken() -> None:
    found = SupportIndex(["Other.", "Oslo hosts it.", "Oslo hosts it."]).find("Oslo hosts it.")
    assert found is not None
    assert found.source == 1


@given(sources=st.lists(st.text(), max_size=4), sentence=st.text())
def test_a_support_is_a_part_of_its_source(sources: list[str], sentence: str) -> None:
    found = SupportIndex(sources).find(sentence)
    if found is not None:
        assert sources[found.source][found.start : found.end].strip()
