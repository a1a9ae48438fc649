"""Frequencies of words are remembered until the number of chunks has changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ragcache_retriever.store.sqlite.document_store import SqliteDocumentStore
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from ragcache_retriever.store.sqlite.word_frequencies import WordFrequencies
from tests.helpers.stored_documents import add_collection, put

LIMIT_S = 60.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteDocumentStore]:
    store = SqliteDocumentStore(tmp_path, DiskReserve(tmp_path, 0))
    yield store
    store.close()


def counted(
    frequencies: WordFrequencies, generation: int, num_chunks: int, *words: str
) -> list[int]:
    phrases = {word: f'"{word}"' for word in words}
    found = frequencies.of(generation, phrases, num_chunks, LIMIT_S)
    return [found[word] for word in words]


def test_chunks_with_any_form_of_a_word_are_counted_in_their_generation(
    store: SqliteDocumentStore,
) -> None:
    first, second = add_collection(store, "c"), add_collection(store, "other")
    put(store, "d", ["cats", "a cat", "dogs", "birds", "fish"], title="")
    put(store, "d", ["cats"], collection="other")
    frequencies = WordFrequencies(store.database)
    assert counted(frequencies, first, 5, "cat", "cats", "dog", "cow") == [2, 2, 1, 0]
    assert counted(frequencies, second, 1, "cat", "dog") == [1, 0]


def test_counting_stops_after_half_of_the_chunks(store: SqliteDocumentStore) -> None:
    generation = add_collection(store, "c")
    put(store, "d", ["cat"] * 100)
    assert counted(WordFrequencies(store.database), generation, 100, "cat") == [51]


def test_a_frequency_is_counted_again_after_a_tenth_of_the_chunks_is_new(
    store: SqliteDocumentStore,
) -> None:
    generation = add_collection(store, "c")
    put(store, "d", ["cat"] * 20 + ["dog"] * 80)
    frequencies = WordFrequencies(store.database)
    assert counted(frequencies, generation, 100, "cat") == [20]
    put(store, "e", ["cat"] * 10)
    assert counted(frequencies, generation, 110, "cat") == [20]
    put(store, "f", ["cat"])
    assert counted(frequencies, generation, 111, "cat") == [31]


def test_a_bounded_number_of_words_is_remembered(store: SqliteDocumentStore) -> None:
    generation = add_collection(store, "c")
    put(store, "d", ["cat"] * 20 + ["dog"] * 80)
    frequencies = WordFrequencies(store.database, max_words=1)
    assert counted(frequencies, generation, 100, "cat", "dog") == [20, 51]
    put(store, "e", ["cat"])
    # "dog" was counted last and is remembered. "cat" is counted again.
    assert counted(frequencies, generation, 101, "dog", "cat") == [51, 21]
