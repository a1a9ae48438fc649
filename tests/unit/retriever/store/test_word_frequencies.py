"""Frequencies of words are remembered until the number of chunks has changed."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ragcache_core.errors import Unavailable
from ragcache_retriever.store.sqlite.document_store import SqliteStore, open_sqlite
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from ragcache_retriever.store.sqlite.lexical import count_chunks
from ragcache_retriever.store.word_frequencies import MAX_WORDS, WordFrequencies
from tests.kit.stored_documents import add_collection, put


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    store = open_sqlite(tmp_path, DiskReserve(tmp_path, 0))
    yield store
    store.database.close()


class CountedWords:
    """The frequencies of a store, with what it counts."""

    def __init__(self, store: SqliteStore, max_words: int = MAX_WORDS) -> None:
        self._store = store
        self._frequencies = WordFrequencies(max_words)

    def of(self, generation: int, num_chunks: int, *words: str) -> list[int]:
        count = functools.partial(count_chunks, self._store.database, generation, num_chunks)
        found = self._frequencies.of(generation, words, num_chunks, count)
        return [found[word] for word in words]


def test_chunks_with_any_form_of_a_word_are_counted_in_their_generation(
    store: SqliteStore,
) -> None:
    first, second = add_collection(store, "c"), add_collection(store, "other")
    put(store, "d", ["cats", "a cat", "dogs", "birds", "fish"], title="")
    put(store, "d", ["cats"], collection="other")
    frequencies = CountedWords(store)
    assert frequencies.of(first, 5, "cat", "cats", "dog", "cow") == [2, 2, 1, 0]
    assert frequencies.of(second, 1, "cat", "dog") == [1, 0]


def test_counting_stops_after_half_of_the_chunks(store: SqliteStore) -> None:
    generation = add_collection(store, "c")
    put(store, "d", ["cat"] * 100)
    assert CountedWords(store).of(generation, 100, "cat") == [51]


def test_a_frequency_is_counted_again_after_a_tenth_of_the_chunks_is_new(
    store: SqliteStore,
) -> None:
    generation = add_collection(store, "c")
    put(store, "d", ["cat"] * 20 + ["dog"] * 80)
    frequencies = CountedWords(store)
    assert frequencies.of(generation, 100, "cat") == [20]
    put(store, "e", ["cat"] * 10)
    assert frequencies.of(generation, 110, "cat") == [20]
    put(store, "f", ["cat"])
    assert frequencies.of(generation, 111, "cat") == [31]


def test_a_bounded_number_of_words_is_remembered(store: SqliteStore) -> None:
    generation = add_collection(store, "c")
    put(store, "d", ["cat"] * 20 + ["dog"] * 80)
    frequencies = CountedWords(store, max_words=1)
    assert frequencies.of(generation, 100, "cat", "dog") == [20, 51]
    put(store, "e", ["cat"])
    # "dog" was counted last and is remembered. "cat" is counted again.
    assert frequencies.of(generation, 101, "dog", "cat") == [51, 21]


def test_words_that_were_counted_before_a_failure_are_remembered() -> None:
    frequencies = WordFrequencies()

    def fail_at_dog(words: Sequence[str]) -> Iterator[int]:
        for word in words:
            if word == "dog":
                raise Unavailable("PostgreSQL", "it takes too long")
            yield 1

    with pytest.raises(Unavailable):
        frequencies.of(1, ["cat", "dog"], 10, fail_at_dog)
    asked: list[str] = []

    def count(words: Sequence[str]) -> list[int]:
        asked.extend(words)
        return [2] * len(words)

    assert frequencies.of(1, ["cat", "dog"], 10, count) == {"cat": 1, "dog": 2}
    assert asked == ["dog"]
