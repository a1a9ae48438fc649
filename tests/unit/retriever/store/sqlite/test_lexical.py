"""The lexical leg finds chunks by their words, in one generation, and forgets what was removed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ragcache_core.errors import Unavailable
from ragcache_core.retrieval.filters import In
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


@pytest.mark.parametrize("max_listed_rows", [0, 1000])
def test_only_allowed_rows_are_found(
    store: DocumentStore, monkeypatch: pytest.MonkeyPatch, max_listed_rows: int
) -> None:
    monkeypatch.setattr(lexical, "MAX_LISTED_ROWS", max_listed_rows)
    generation = add_collection(store, "c")
    for i in range(20):
        put(store, f"d{i:02}", ["apple " * (20 - i)], metadata={"parity": str(i % 2)})
    allowed = store.reads.allowed_rows(generation, In("parity", ("1",)))
    assert len(allowed) == 10
    hits = store.lexical.hits(generation, ["apple"], 3, allowed=allowed)
    everything = store.lexical.hits(generation, ["apple"], 20)
    assert hits == [hit for hit in everything if hit.row in allowed][:3]
    assert not store.lexical.hits(generation, ["apple"], 3, allowed=np.empty(0, np.int64))


def test_a_query_that_takes_too_long_is_ended_and_the_next_one_is_not(
    store: DocumentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = add_collection(store, "c")
    put(store, "d", [f"apple {i}" for i in range(2000)])
    with monkeypatch.context() as patch:
        patch.setattr(lexical, "LIMIT_S", -1.0)
        with pytest.raises(Unavailable, match="interrupted"):
            store.lexical.hits(generation, ["apple"], 10)
    assert len(store.lexical.hits(generation, ["apple"], 10)) == 10
    assert len(store.database.read("SELECT row FROM chunks")) == 2000


def test_a_query_that_is_cancelled_is_ended(store: DocumentStore) -> None:
    generation = add_collection(store, "c")
    put(store, "d", [f"apple {i}" for i in range(2000)])
    with pytest.raises(Unavailable, match="interrupted"):
        store.lexical.hits(generation, ["apple"], 10, cancelled=lambda: True)
    assert len(store.lexical.hits(generation, ["apple"], 10, cancelled=lambda: False)) == 10
