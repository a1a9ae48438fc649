"""The words of a question that the lexical leg searches for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_retriever.search.lexical import MAX_WORDS, question_words


def test_common_words_and_repetitions_are_left_out() -> None:
    assert question_words("What is the cache of a Cache store?") == ["cache", "store"]


def test_common_words_count_if_there_are_no_others() -> None:
    assert question_words("to be or not to be") == ["to", "be", "or", "not"]


def test_a_long_question_keeps_its_longest_words_in_order() -> None:
    words = [f"word{'x' * (i % 7)}{i}" for i in range(2 * MAX_WORDS)]
    kept = question_words(" ".join(words))
    assert len(kept) == MAX_WORDS
    assert kept == [word for word in words if word in kept]
    assert min(map(len, kept)) >= max(len(word) for word in words if word not in kept) - 1


@given(st.text(max_size=200))
def test_words_are_plain_whatever_the_question(question: str) -> None:
    words = question_words(question)
    assert all(word.isalnum() for word in words)
    assert len(set(words)) == len(words)
