"""Hyphens at the ends of lines."""

from __future__ import annotations

from collections.abc import Container

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_gateway.extraction.hyphens import HyphenChoice, language_of, words_of
from ragcache_gateway.extraction.pdf import _known_words

ENGLISH = "The rest of the text is in English, and that is clear to the reader of it."
GERMAN = "Der Rest ist Deutsch und das ist mit der Zeit für die Leser nicht neu."


def joined(broken: str, text: str = ENGLISH) -> str:
    before, _, after = broken.partition("|")
    return HyphenChoice(words_of([text]), _known_words).joined(before, after)


@pytest.mark.parametrize(
    ("broken", "whole"),
    [
        ("a power fail|ure.", "a power failure."),
        ("the manage|ment of", "the management of"),
        ("an over|view of", "an overview of"),
        ("of Ger|many and", "of Germany and"),
        ("kuber|netes runs", "kubernetes runs"),
        ("PERFOR|MANCE", "PERFORMANCE"),
        ("a write|ahead log", "a write-ahead log"),
        ("state-of-the|art design", "state-of-the-art design"),
        ("the long|term plan", "the long-term plan"),
        ("a multi|node setup", "a multi-node setup"),
        ("GPU|based and", "GPU-based and"),
        ("UTF|LE text", "UTF-LE text"),
        ("--max|retries 3", "--max-retries 3"),
        ("-f --no|force", "-f --no-force"),
        ("ISO|8601 for", "ISO-8601 for"),
        ("order 2024|0117.", "order 2024-0117."),
        ("the Navier|Stokes equation", "the Navier-Stokes equation"),
        ("an e|mail to", "an e-mail to"),
        ("at https://a.example/user|guide now", "at https://a.example/user-guide now"),
        ("kind/my-name|space.yaml", "kind/my-name-space.yaml"),
        ("pre|and post-processing", "pre- and post-processing"),
    ],
)
def test_a_hyphen_stays_where_it_belongs_to_the_word(broken: str, whole: str) -> None:
    assert joined(broken) == whole


@pytest.mark.parametrize(
    ("broken", "whole"),
    [("die Donau|dampfer", "die Donaudampfer"), ("Vor|und Nachteile", "Vor- und Nachteile")],
)
def test_german_writes_compounds_as_one_word(broken: str, whole: str) -> None:
    assert joined(broken, GERMAN) == whole


def test_the_words_of_the_document_decide_first() -> None:
    assert joined("the write|ahead log", f"{ENGLISH} A writeahead log.") == "the writeahead log"
    assert joined("a fail|ure.", f"{ENGLISH} Say fail-ure here.") == "a fail-ure."


def test_the_language_is_that_of_the_frequent_words() -> None:
    assert language_of(words_of([ENGLISH])) == "en"
    assert language_of(words_of([GERMAN])) == "de"
    assert language_of(words_of(["Le reste est dans la langue des lecteurs et une autre."])) == "fr"
    assert language_of({}) == "en"


def test_the_list_of_words_is_read_only_if_the_document_does_not_decide() -> None:
    def refuse(language: str) -> Container[str]:
        raise AssertionError(language)

    choice = HyphenChoice(words_of(["A failure."]), refuse)
    assert choice.joined("a fail", "ure of") == "a failure of"
    assert choice.joined("the year 2024", "25") == "the year 2024-25"


words = st.text(st.characters(categories=["L", "N", "P"]), max_size=8)


@given(
    before=st.lists(words).map(" ".join), after=st.lists(words).map(" ".join), known=st.sets(words)
)
def test_joining_changes_nothing_but_the_hyphen(before: str, after: str, known: set[str]) -> None:
    choice = HyphenChoice(words_of([before, after]), lambda _: known)
    results = {f"{before}{joint}{after}" for joint in ("", "-", "- ")}
    assert choice.joined(before, after) in results


@given(left=words, right=words)
def test_a_word_with_a_digit_keeps_its_hyphen(left: str, right: str) -> None:
    choice = HyphenChoice({}, lambda _: frozenset())
    assert choice.joined(f"{left}7", f"{right}") == f"{left}7-{right}"
