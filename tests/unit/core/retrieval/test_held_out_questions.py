"""A held-out question is a sentence of the text, and the rest lacks it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.retrieval.held_out_questions import (
    MAX_WORDS,
    MIN_SENTENCES,
    MIN_WORDS,
    held_out_question,
)

sentence_lengths = st.lists(st.integers(1, MAX_WORDS + 5), max_size=6)


def sentence(i: int, num_words: int) -> str:
    return " ".join(f"w{i}x{j}" for j in range(num_words)) + "."


@given(sentence_lengths, st.sampled_from([" ", "\n", "\n\n"]))
def test_a_sentence_moves_from_the_text_to_the_question(lengths: list[int], between: str) -> None:
    sentences = [sentence(i, length) for i, length in enumerate(lengths)]
    found = held_out_question(between.join(sentences))
    is_suitable = any(MIN_WORDS <= length <= MAX_WORDS for length in lengths)
    if len(lengths) < MIN_SENTENCES or not is_suitable:
        assert found is None
        return
    assert found is not None
    assert found.question in sentences
    assert found.rest.split("\n") == [one for one in sentences if one != found.question]


@pytest.mark.parametrize("text", ["", "One sentence.", "a. b. c. d.", "\n\n\n"])
def test_a_text_without_sentences_has_no_question(text: str) -> None:
    assert held_out_question(text) is None
