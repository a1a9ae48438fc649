"""Queries of questions that refer to earlier turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.retrieval.query_rewriting import (
    MAX_QUERY_CHARS,
    MAX_TERMS,
    condense,
    refers_back,
    rewrite_query,
)

roles = st.sampled_from(["user", "assistant"])
turns = st.lists(st.tuples(roles, st.text(max_size=200)), max_size=8)


@pytest.mark.parametrize(
    "question",
    [
        "And who owns it?",
        "Where does it run?",
        "What about hotels?",
        "Why?",
        "How long are they valid?",
        "Who repairs that?",
        "but since when?",
    ],
)
def test_a_question_that_refers_to_a_turn_gets_its_words(question: str) -> None:
    before = [("user", "Where does the Billing service run?"), ("assistant", "In eu-north.")]
    assert refers_back(question)
    query = rewrite_query(before, question)
    assert query.startswith(question)
    assert {"Billing", "service", "eu-north"} <= set(query.split())


@pytest.mark.parametrize(
    "question",
    [
        "Where does the search service run?",
        "Is there a limit for hotels on trips?",
        "How many days of vacation do employees have?",
    ],
)
def test_a_question_that_stands_alone_stays_as_it_is(question: str) -> None:
    assert not refers_back(question)
    assert rewrite_query([("user", "Who owns billing?")], question) == question


def test_the_words_come_from_the_last_question_that_stands_alone() -> None:
    before = [
        ("user", "Who owns the search service?"),
        ("assistant", "Compass."),
        ("user", "Where does the payments service run?"),
        ("assistant", "It runs in the eu-north region."),
        ("user", "And who owns it?"),
        ("assistant", "Its owner is Till."),
    ]
    query = rewrite_query(before, "Since when does it run there?")
    assert "payments" in query
    assert {"Till", "eu-north"} <= set(query.split())
    assert "search" not in query, "an older topic"
    assert "owner" not in query, "of an answer only names count"


@given(turns=turns, question=st.text(max_size=300))
def test_a_query_is_the_question_and_a_few_words_of_the_turns(
    turns: list[tuple[str, str]], question: str
) -> None:
    query = rewrite_query(turns, question)
    assert query.startswith(question)
    added = query[len(question) :].split()
    assert len(added) <= MAX_TERMS
    assert all(any(word in text for _, text in turns) for word in added)
    assert rewrite_query([], question) == question


@given(text=st.text(max_size=20), count=st.integers(1, 2000))
def test_a_query_is_never_too_long(text: str, count: int) -> None:
    long = (text + " ") * count
    assert len(condense(long)) <= MAX_QUERY_CHARS
    assert len(rewrite_query([("user", long)], long)) <= MAX_QUERY_CHARS


def test_a_long_message_keeps_its_beginning_and_its_end() -> None:
    text = "Translate this. " + "filler words " * 2000 + "Where does billing run?"
    query = condense(text)
    assert query.startswith("Translate this.")
    assert query.endswith("Where does billing run?")


@pytest.mark.timeout(60)
def test_megabytes_of_a_client_are_not_read_again_for_each_word() -> None:
    # The gateway's event loop does this. Reading all of a text before each word would take hours.
    text = "the Billing service runs in Oslo and keeps many logs. " * 100_000
    query = rewrite_query([("user", "Where is it?"), ("assistant", text)], "And who owns it?")
    assert {"Billing", "Oslo"} <= set(query.split())
    assert len(rewrite_query([("user", text)], text)) <= MAX_QUERY_CHARS


def test_names_of_a_turn_are_found_wherever_a_sentence_does_not_begin() -> None:
    text = "Then Oslo. Often it restarts:\n  Rarely Bergen"
    query = rewrite_query([("assistant", text)], "And who owns it?")
    assert query == "And who owns it? Oslo Bergen"
