"""The terms of a question that the lexical leg searches for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_retriever.search.lexical import MAX_TERMS, question_terms


def test_common_words_and_repetitions_are_left_out() -> None:
    assert question_terms("What is the cache of a Cache store?") == ["cache", "store"]


def test_common_words_count_if_there_are_no_others() -> None:
    assert question_terms("to be or not to be") == ["to", "be", "or", "not"]


def test_a_long_question_keeps_its_longest_words_in_order() -> None:
    words = [f"{'abcdefgh'[i % 8]}{'x' * (i // 8)}" for i in range(2 * MAX_TERMS)]
    kept = question_terms(" ".join(words))
    assert len(kept) == MAX_TERMS
    assert kept == [word for word in words if word in kept]
    assert min(map(len, kept)) >= max(len(word) for word in words if word not in kept) - 1


def test_a_long_question_keeps_its_identifiers() -> None:
    words = [f"{'word' * 9}{'abcdefgh'[i % 8] * (i + 1)}" for i in range(2 * MAX_TERMS)]
    kept = question_terms(" ".join([*words, "C#"]))
    assert len(kept) == MAX_TERMS
    assert kept[-1] == "c#="


@given(st.text(max_size=200))
def test_terms_are_distinct_and_not_empty_whatever_the_question(question: str) -> None:
    terms = question_terms(question)
    assert all(terms)
    assert len(set(terms)) == len(terms) <= MAX_TERMS


def test_a_long_question_without_spaces_keeps_all_its_characters() -> None:
    question = "".join(chr(0x4E00 + 97 * i % 5000) for i in range(60))
    assert set("".join(question_terms(question))) == set(question)
