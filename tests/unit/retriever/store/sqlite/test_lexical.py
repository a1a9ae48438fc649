"""The lexical leg finds chunks by their words, in one generation, and forgets what was removed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ragcache_core.errors import Unavailable
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.sqlite import lexical
from ragcache_retriever.store.sqlite.document_store import open_sqlite
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from tests.kit.stored_documents import add_collection, delete, put


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DocumentStore]:
    store = open_sqlite(tmp_path, DiskReserve(tmp_path, 0))
    yield store
    store.database.close()


def documents(store: DocumentStore, generation: int, *words: str) -> list[str]:
    hits = store.lexical.hits(generation, words, 10)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    positions = store.reads.positions([hit.row for hit in hits])
    return [positions[hit.row][0] for hit in hits]


def test_replaced_and_deleted_texts_are_forgotten(store: DocumentStore) -> None:
    generation = add_collection(store, "c")
    put(store, "d", ["alpha", "beta"])
    put(store, "d", ["beta", "gamma"])
    assert documents(store, generation, "alpha") == []
    assert documents(store, generation, "beta") == ["d"]
    delete(store, "d")
    assert documents(store, generation, "beta", "gamma") == []
    name = f"lexical_{generation}"
    store.database.query(f"INSERT INTO {name} ({name}) VALUES ('integrity-check')")


def test_a_query_that_takes_too_long_is_ended_and_the_next_one_is_not(
    store: DocumentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = add_collection(store, "c")
    put(store, "d", [f"apple {i}" for i in range(2000)])
    with monkeypatch.context() as patch:
        patch.setattr(lexical, "LIMIT_S", -1.0)
        for allowed in (None, store.embeddings.rows(generation)):
            with pytest.raises(Unavailable, match="interrupted"):
                store.lexical.hits(generation, ["apple"], 10, allowed=allowed)
    assert len(store.lexical.hits(generation, ["apple"], 10)) == 10
    assert len(store.database.read("SELECT row FROM chunks")) == 2000


def test_a_search_with_a_filter_reads_the_rarest_words_and_few_uses(
    store: DocumentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = add_collection(store, "c")
    put(store, "common", [f"apple apple {i}" for i in range(100)])
    put(store, "rare", ["apple pear"])
    allowed = store.embeddings.rows(generation)

    def found(*words: str) -> list[float]:
        hits = store.lexical.hits(generation, words, 200, allowed=allowed)
        return [hit.score for hit in hits]

    rarest = found("pear")
    assert len(found("apple", "pear")) == 101
    monkeypatch.setattr(lexical, "MAX_USES", 50)
    # What the common word finds does not fit.
    assert found("apple", "pear") == rarest
    # Alone it finds some chunks rather than none: the first 51 uses are those of 26 chunks.
    assert len(found("apple")) == 26


def test_a_query_that_is_cancelled_is_ended(store: DocumentStore) -> None:
    generation = add_collection(store, "c")
    put(store, "d", [f"apple {i}" for i in range(2000)])
    with pytest.raises(Unavailable, match="interrupted"):
        store.lexical.hits(generation, ["apple"], 10, cancelled=lambda: True)
    assert len(store.lexical.hits(generation, ["apple"], 10, cancelled=lambda: False)) == 10
