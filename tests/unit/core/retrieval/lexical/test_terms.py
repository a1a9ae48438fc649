"""Texts become words, pairs of characters, and identifiers whose parts keep their order."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.retrieval.lexical.terms import (
    IDENTIFIER_MARK,
    MAX_TERM_CHARACTERS,
    is_identifier,
    terms_of,
)


def identifiers_of(text: str) -> list[str]:
    """Return the identifiers that decide, without their mark."""
    return [term[:-1] for term in terms_of(text) if is_identifier(term)]


def test_words_have_no_case_accents_or_marks() -> None:
    assert terms_of("Über: l'été, (naïve) don't") == [
        "uber", "l", "ete", "naive", "don", "t",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host 172.16.4.9.", ["172.16.4.9"]),
        ("10.8.4.9:5432 10.8.4.0/24", ["10.8.4.9:5432", "10.8.4.9", "10.8.4.0/24", "10.8.4.0"]),
        ("2001:db8::1", ["2001:db8::1"]),
        ("on 2023-11-02T08:15:00", ["2023-11-02", "08:15:00"]),
        ("**C++**, `C#`/.NET or C++20!", ["c++", "c#", ".net", "c++"]),
        ("`--dry-run=client` (-v) -Xmx", ["--dry-run", "-v", "-xmx"]),
        ("ERRCONN4012: see ISO-8601", ["errconn4012", "iso-8601"]),
        ("release v2.40.1 is 2.40.1", ["2.40.1", "v2.40.1", "2.40.1"]),
        ("part AX-100/B", ["ax-100/b", "ax-100"]),
        ("see /etc/hosts.allow", ["/etc/hosts.allow", "/etc", "hosts.allow"]),
        (r"C:\Users\ann", [r"c:\users\ann"]),
        ("mail ann.lee@example.org", ["ann.lee@example.org", "ann.lee", "example.org"]),
        ("max_tokens of std::vector", ["max_tokens", "std::vector"]),
        ("order 4711081", ["4711081"]),
        ("代码E4071是", ["e4071"]),
    ],
)  # fmt: skip
def test_an_identifier_keeps_its_parts_in_order(text: str, expected: list[str]) -> None:
    assert identifiers_of(text) == expected


@pytest.mark.parametrize(
    "text",
    ["and/or", "long-term", "e.g. U.S.", "12-month", "5km", "3rd", "in 2024", "word--word",
     "wait...what", "- item", "* item", "-5", "50%", "IL-6", "p53", "2.5", "1,500",
     "Dr.", "end. The", "a -> b"],
)  # fmt: skip
def test_other_text_has_no_identifier(text: str) -> None:
    assert identifiers_of(text) == []


def test_parts_in_another_order_are_another_identifier() -> None:
    found = [identifiers_of(".".join(parts)) for parts in itertools.permutations(["7", "41", "8"])]
    assert len({tuple(one) for one in found}) == len(found)


def test_the_words_of_an_identifier_are_found_without_it() -> None:
    assert {"max", "tokens"} <= set(terms_of("max_tokens"))
    assert {"iso", "8601"} <= set(terms_of("ISO-8601"))


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("员工每年有十五天年假", "年假"),
        ("ガラスの割れた窓を交換する", "ガラス"),
        ("鍵を忘れた場合", "鍵"),
        ("วันหยุดพักผ่อนประจำปี", "พักผ่อน"),
        ("휴가는 매년 이십 일입니다", "휴가"),
        ("주문에는 물이 필요합니다", "물"),
        ("ＶＰＮに接続する", "vpn"),
    ],
    ids=["Chinese", "Japanese", "one character", "Thai", "Korean", "one syllable", "full width"],
)
def test_a_word_inside_a_sentence_has_its_terms_there(text: str, question: str) -> None:
    assert set(terms_of(question)) <= set(terms_of(text))


def test_letters_with_marks_stay_in_one_word() -> None:
    assert terms_of("हिन्दी भाषा") == ["हिन्दी", "भाषा"]


@given(st.text())
def test_terms_have_no_spaces_and_a_bounded_length(text: str) -> None:
    for term in terms_of(text):
        assert 0 < len(term) <= MAX_TERM_CHARACTERS + len(IDENTIFIER_MARK)
        assert term.split() == [term]
        assert "\0" not in term


@given(st.lists(st.text(), max_size=4))
def test_the_terms_of_words_are_terms_of_their_text(words: list[str]) -> None:
    tokens = [token for word in words for token in word.split()]
    parts = Counter(term for token in tokens for term in terms_of(token))
    assert parts <= Counter(terms_of(" ".join(tokens)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Lease of hall A, Annex 12 (Salón B).", ["hall#a", "annex#12", "salon#b"]),
        ("A hall. I am in a hall, is 5 or 3.5", []),
        ("Host 10.0.1.2 of plan C++", []),
    ],
    ids=["names", "articles and decimals", "identifiers"],
)
def test_a_word_keeps_the_number_or_letter_after_it(text: str, expected: list[str]) -> None:
    found = [term for term in terms_of(text) if "#" in term]
    assert [term for term in found if not term.endswith(IDENTIFIER_MARK)] == expected


@pytest.mark.parametrize("text", ["a" * 1_000_000, "\u0e01" * 1_000_000, "abc" + " " * 1_000_000])
def test_a_text_of_one_word_takes_no_hours(text: str) -> None:
    assert len(terms_of(text)) < 3 * len(text)


@pytest.mark.parametrize("word", ["ab1" * 2000, "1" * 6000, "a" * 6000])
def test_a_long_word_becomes_a_term_that_an_index_can_hold(word: str) -> None:
    assert terms_of(word) == [word[:MAX_TERM_CHARACTERS]]
