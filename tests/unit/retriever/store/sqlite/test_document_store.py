"""The SQLite store owns one folder, and a transaction is applied as a whole or not at all."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_retriever.documents.collection import Chunking
from ragcache_retriever.store import documents
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import BatchRemoval
from ragcache_retriever.store.sqlite import lexical
from ragcache_retriever.store.sqlite.document_store import open_sqlite
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from ragcache_retriever.store.sqlite.schema import FILE_NAME
from tests.kit.stored_documents import (
    NOW_MS,
    RECIPE,
    a_document,
    add_collection,
    chunks_of,
    delete,
    digest_of_text,
    put,
    put_into,
)


def open_store(folder: Path) -> DocumentStore:
    return open_sqlite(folder, DiskReserve(folder, 0))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DocumentStore]:
    store = open_store(tmp_path)
    add_collection(store, "c")
    yield store
    store.database.close()


def serving(store: DocumentStore, collection: str = "c") -> int:
    found = store.collections.one(collection)
    assert found is not None
    assert found.serving is not None
    return found.serving.row


def texts_of(store: DocumentStore, document_id: str) -> list[str]:
    return [
        chunk.text for chunk, _ in store.embeddings.of_document("c", document_id, serving(store))
    ]


@pytest.mark.parametrize(
    "other",
    [
        a_document("d", "other"),
        a_document("d", title="other"),
        a_document("d", content_type=2),
        a_document("d", metadata={"k": "v"}),
    ],
)
def test_the_content_hash_sees_every_part(other: object) -> None:
    assert a_document("d").content_hash() == a_document("e", title="d").content_hash()
    assert a_document("d").content_hash() != other.content_hash()  # type: ignore[attr-defined]


def test_a_write_that_the_disk_refuses_is_unavailable(store: DocumentStore) -> None:
    [(pages,)] = store.database.query("PRAGMA page_count")
    store.database.query(f"PRAGMA max_page_count = {pages + 1}")
    with pytest.raises(Unavailable, match="full"):
        put(store, "d", ["x" * 100_000])
    assert store.reads.get("c", "d") is None


def test_the_outbox_survives_a_restart(store: DocumentStore, tmp_path: Path) -> None:
    put(store, "d", ["a"])
    delete(store, "d")
    store.database.close()
    store.database.__init__(tmp_path, DiskReserve(tmp_path, 0))  # type: ignore[misc]  # the fixture closes it
    with store.database.transaction():
        [deletion] = store.outbox.claim_of("c", "d", NOW_MS, is_repeated=True)
    assert deletion.token_digests == (digest_of_text("a"),)


def test_digests_that_no_other_document_has_are_found_in_parts(
    store: DocumentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "DIGESTS_AT_ONCE", 2)
    put(store, "d", ["a", "b", "c", "d", "e"])
    put(store, "other", ["b", "e"])
    change = delete(store, "d")
    assert change is not None
    assert [one.token_digests for one in change.deletes] == [tuple(map(digest_of_text, "acd"))]


WORDS_PER_CHUNK = 150


def fill(store: DocumentStore, num_documents: int) -> None:
    """Put documents whose words have many pages, because each word is in one chunk only."""
    for i in range(num_documents):
        put(store, f"d{i}", [words_of(i)])


def words_of(i: int) -> str:
    return " ".join(f"w{i}x{j}" for j in range(WORDS_PER_CHUNK))


def free_pages(store: DocumentStore) -> int:
    [(count,)] = store.database.query("PRAGMA freelist_count")
    return int(count)


def tables_of_words(store: DocumentStore, generation: int) -> list[str]:
    rows = store.database.query("SELECT name FROM sqlite_master WHERE type = 'table'")
    beginnings = (f"lexical_{generation}", f"detached_{generation}")
    return [name for (name,) in rows if name.startswith(beginnings)]


def remove(store: DocumentStore, step: Callable[[], BatchRemoval]) -> list[int]:
    """Repeat a step until it is done. Return how many pages each transaction has freed."""
    freed = []
    is_done = False
    while not is_done:
        before = free_pages(store)
        with store.database.transaction():
            is_done = step().is_done
            store.database.commit()
        freed.append(free_pages(store) - before)
    return freed


def test_the_words_of_a_retired_generation_are_removed_in_steps(
    store: DocumentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lexical, "_ROWS_AT_ONCE", {"data": 4, "docsize": 16})
    generation = serving(store)
    fill(store, 200)
    [(num_pages,)] = store.database.query(f"SELECT count(*) FROM lexical_{generation}_data")
    assert num_pages > 80
    with store.database.transaction():
        building = store.collections.add_generation("c", replace(RECIPE, chunking=Chunking(32, 0)))
        store.database.commit()
    for i in range(200):
        put_into(store, building, f"d{i}", chunks_of([f"new {i}"]), words_of(i))
    with store.database.transaction():
        assert store.collections.switch_generation("c")
        store.database.commit()
    freed = remove(store, lambda: store.documents.remove_retired(generation, 10, NOW_MS))
    # 20 steps for the documents, then at least one for each 4 pages of words.
    assert len(freed) > 20 + num_pages / 4
    assert max(freed) < num_pages / 2
    assert tables_of_words(store, generation) == []
    assert len(store.lexical.hits(serving(store), ["new"], 500)) == 200
    assert store.database.query("PRAGMA integrity_check") == [("ok",)]


def test_a_removal_goes_on_after_a_restart(
    store: DocumentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lexical, "_ROWS_AT_ONCE", {"data": 4, "docsize": 16})
    generation = serving(store)
    fill(store, 50)
    with store.database.transaction():
        store.collections.start_deleting("c")
        store.documents.remove_of_collection("c", 10, NOW_MS)
        store.database.commit()
    assert tables_of_words(store, generation) == [
        f"detached_{generation}_data",
        f"detached_{generation}_docsize",
    ]
    store.database.close()
    store.database.__init__(tmp_path, DiskReserve(tmp_path, 0))  # type: ignore[misc]  # the fixture closes it
    remove(store, lambda: store.documents.remove_of_collection("c", 10, NOW_MS))
    assert tables_of_words(store, generation) == []
    with store.database.transaction():
        store.collections.drop("c")
        store.database.commit()
    for table in ("texts", "document_fields", "prepared", "embeddings", "chunks", "generations"):
        assert store.database.query(f"SELECT count(*) FROM {table}") == [(0,)]


def test_listings_and_counters_read_no_text(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    add_collection(store, "c")
    for i in range(40):
        put(store, f"d{i:02}", ["word " * 4000])
    store.database.close()
    store = open_store(tmp_path)
    num_bytes = store.database.disk().used_bytes
    assert num_bytes > 40 * 2 * 20_000  # document and chunk
    page_bytes = store.database.read("PRAGMA page_size")[0][0]
    before = pages_read(tmp_path)
    store.collections.all()
    page, _ = store.reads.page("c", "", 100)
    assert store.reads.unprepared("c", serving(store), "", 10) == []
    store.embeddings.rows(serving(store))
    read_bytes = pages_read(tmp_path) - before
    assert len(page) == 40
    assert 0 < read_bytes < num_bytes / 10
    assert page_bytes == 4096
    store.database.close()


def pages_read(folder: Path) -> int:
    """Return the bytes that this process has read so far, from disk or from the page cache."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


def test_a_second_process_gets_a_clear_error(store: DocumentStore, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="in use by another retriever"):
        open_store(tmp_path)


def test_a_folder_is_free_after_close(tmp_path: Path) -> None:
    for _ in range(2):
        open_store(tmp_path).database.close()


def test_another_schema_is_refused(tmp_path: Path) -> None:
    open_store(tmp_path).database.close()
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(InvalidInput, match=r"schema 2.*reads 8"):
        open_store(tmp_path)


def test_a_file_of_another_application_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    with pytest.raises(InvalidInput, match="not written by a retriever"):
        open_store(tmp_path)
