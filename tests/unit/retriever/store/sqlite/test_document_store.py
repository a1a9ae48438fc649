"""The SQLite store owns one folder, and a transaction is applied as a whole or not at all."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ragcache_core.errors import InvalidInput, TooLarge, Unavailable
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.documents.collection import Chunking, CollectionSettings
from ragcache_retriever.store.outbox import OutboxDelete
from ragcache_retriever.store.records import DocumentChange
from ragcache_retriever.store.sqlite.document_store import SqliteDocumentStore
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from ragcache_retriever.store.sqlite.schema import FILE_NAME
from tests.helpers.stored_documents import (
    NOW_MS,
    RECIPE,
    a_document,
    add_collection,
    chunks_of,
    delete,
    digest_of_text,
    put,
    put_into,
    vector_of,
    version_of,
)


def open_store(folder: Path) -> SqliteDocumentStore:
    return SqliteDocumentStore(folder, DiskReserve(folder, 0))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteDocumentStore]:
    store = open_store(tmp_path)
    add_collection(store, "c")
    yield store
    store.close()


def serving(store: SqliteDocumentStore, collection: str = "c") -> int:
    found = store.collection(collection)
    assert found is not None
    assert found.serving is not None
    return found.serving.row


def texts_of(store: SqliteDocumentStore, document_id: str) -> list[str]:
    return [chunk.text for chunk, _ in store.embedded("c", document_id, serving(store))]


def test_what_was_put_is_read_back(store: SqliteDocumentStore) -> None:
    document = a_document("d", "body", title="T", content_type=2, metadata={"k": "v", "ü": ""})
    with store.transaction():
        chunks = {serving(store): chunks_of(["body"])}
        store.replace("c", document, version_of(document), chunks, now_ms=NOW_MS, claim=False)
        store.commit()
    found = store.get("c", "d")
    assert found is not None
    assert (found.document, found.version, found.num_chunks) == (document, version_of(document), 1)
    assert found.prepared == {serving(store)}
    assert store.find("c", "d") == replace(found, document=replace(document, text=""))
    assert store.get("c", "other") is None
    assert store.get("other", "d") is None


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


def test_an_uncommitted_change_never_happened(store: SqliteDocumentStore) -> None:
    put(store, "d", ["one"])
    put(store, "d", ["two"], commit=False)
    assert texts_of(store, "d") == ["one"]


def test_an_error_inside_a_transaction_undoes_it(store: SqliteDocumentStore) -> None:
    def fail() -> None:
        with store.transaction():
            store.delete("c", "d", NOW_MS)
            raise KeyError

    put(store, "d", ["one"])
    with pytest.raises(KeyError):
        fail()
    assert store.get("c", "d") is not None
    put(store, "e", ["two"])


def test_a_write_that_the_disk_refuses_is_unavailable(store: SqliteDocumentStore) -> None:
    [(pages,)] = store.database.query("PRAGMA page_count")
    store.database.query(f"PRAGMA max_page_count = {pages + 1}")
    with pytest.raises(Unavailable, match="full"):
        put(store, "d", ["x" * 100_000])
    assert store.get("c", "d") is None


def acknowledge(store: SqliteDocumentStore, deletes: Sequence[OutboxDelete]) -> None:
    with store.transaction():
        store.outbox.acknowledge([], [one.id for one in deletes], NOW_MS)
        store.commit()


def removed_digests(change: DocumentChange) -> list[bytes]:
    return [digest for delete in change.deletes for digest in delete.token_digests]


def test_removed_digests_are_those_of_no_other_chunk_in_the_collection(
    store: SqliteDocumentStore,
) -> None:
    add_collection(store, "other")
    put(store, "elsewhere", ["b"], collection="other")
    put(store, "d", ["a", "b", "c", "b"])
    put(store, "e", ["c"])
    replacement = put(store, "d", ["a", "new"], claim=True)
    assert removed_digests(replacement) == [digest_of_text("b")]
    acknowledge(store, replacement.deletes)
    change = delete(store, "d")
    assert change is not None
    assert removed_digests(change) == [digest_of_text("a"), digest_of_text("new")]
    assert delete(store, "d") is None


def pending(store: SqliteDocumentStore) -> list[OutboxDelete]:
    with store.transaction():
        claim = store.outbox.claim(1000, NOW_MS)
        store.commit()
    return list(claim.deletes)


def test_a_change_and_its_deletes_are_one_transaction(store: SqliteDocumentStore) -> None:
    put(store, "d", ["a"])
    with store.transaction():
        store.delete("c", "d", NOW_MS)
    assert store.removals(0, 10) == ([], 0)
    assert pending(store) == []
    put(store, "d", ["b"])
    [update] = pending(store)
    assert (update.token_digests, update.names_document) == ((digest_of_text("a"),), False)
    delete(store, "d")
    with store.transaction():
        [deletion] = store.outbox.claim_of("c", "d", NOW_MS, is_repeated=True)[1:]
    assert (deletion.token_digests, deletion.names_document) == ((digest_of_text("b"),), True)
    removals, last = store.removals(0, 10)
    assert [(one.collection, one.document) for one in removals] == [("c", "d")] * 2
    assert removals[-1].sequence == last


def test_a_change_returns_earlier_deletes_of_the_document_that_no_shard_has(
    store: SqliteDocumentStore,
) -> None:
    put(store, "d", ["a"])
    put(store, "other", ["x"])
    put(store, "other", ["y"])
    put(store, "d", ["b"])  # its gateway may have ended
    second = put(store, "d", ["c"], claim=True)
    assert set(removed_digests(second)) == {digest_of_text("a"), digest_of_text("b")}
    assert put(store, "d", ["c"], claim=True).deletes == second.deletes  # removes nothing itself
    acknowledge(store, second.deletes[:1])
    deletion = delete(store, "d")
    assert deletion is not None
    assert set(removed_digests(deletion)) == {digest_of_text("b"), digest_of_text("c")}


def test_the_outbox_survives_a_restart(store: SqliteDocumentStore, tmp_path: Path) -> None:
    put(store, "d", ["a"])
    delete(store, "d")
    store.close()
    store.__init__(tmp_path, DiskReserve(tmp_path, 0))  # type: ignore[misc]  # the fixture closes it
    with store.transaction():
        [deletion] = store.outbox.claim_of("c", "d", NOW_MS, is_repeated=True)
    assert deletion.token_digests == (digest_of_text("a"),)


def added_rows(change: DocumentChange) -> tuple[int, ...]:
    [index] = change.indexes
    return index.added


def test_rows_are_never_reused(store: SqliteDocumentStore) -> None:
    first = put(store, "d", ["a", "b"])
    second = put(store, "d", ["c"])
    assert second.indexes[0].removed == added_rows(first)
    assert min(added_rows(second)) > max(added_rows(first))
    delete(store, "d")
    assert min(added_rows(put(store, "d", ["c"]))) > max(added_rows(second))


def test_neighbours_stay_within_their_document(store: SqliteDocumentStore) -> None:
    rows = added_rows(put(store, "d", ["0", "1", "2", "3", "4"]))
    others = added_rows(put(store, "e", ["5"]))
    found = store.neighbourhoods([rows[2], rows[0], others[0], 10**9], window=1)
    assert found.keys() == {rows[2], rows[0], others[0]}
    middle = found[rows[2]]
    assert [c.text for c in (*middle.before, middle.chunk, *middle.after)] == ["1", "2", "3"]
    assert middle.chunk.heading_path == ("A", "B")
    assert middle.chunk.tokenizer == "tokenizer"
    assert middle.chunk.token_ids == np.arange(1, dtype="<u4").tobytes()
    stored = store.find("c", "d")
    assert stored is not None
    assert (middle.chunk.content_hash, middle.chunk.updated_unix_ms) == (stored.content_hash, 7)
    assert not found[rows[0]].before
    assert not found[others[0]].before
    assert not found[others[0]].after
    assert store.positions([rows[3], others[0], 10**9]) == {rows[3]: ("d", 3), others[0]: ("e", 0)}


def test_pages_follow_each_other(store: SqliteDocumentStore) -> None:
    names = [f"d{i}" for i in range(5)]
    for name in reversed(names):
        put(store, name, ["a"])
    seen: list[str] = []
    after: str | None = ""
    while after is not None:
        page, after = store.page("c", after, 2)
        assert len(page) <= 2
        assert all(stored.document.text == "" for stored in page)
        seen += [stored.document.id for stored in page]
    assert seen == names


def test_embeddings_come_back_by_generation_and_row(store: SqliteDocumentStore) -> None:
    rows = [*added_rows(put(store, "d", ["a", "b"])), *added_rows(put(store, "e", ["c"]))]
    generation = serving(store)
    assert store.rows(generation).tolist() == rows
    found, vectors = store.vectors_after(generation, 0, 2)
    assert found.tolist() == rows[:2]
    assert np.array_equal(vectors, np.array([vector_of("a"), vector_of("b")]))
    rest, _ = store.vectors_after(generation, rows[1], 2)
    assert rest.tolist() == rows[2:]
    some, vectors = store.vectors(generation, [rows[2], 10**9])
    assert some.tolist() == [rows[2]]
    assert np.array_equal(vectors, [vector_of("c")])
    assert len(store.rows(generation + 1)) == 0
    assert len(store.vectors_after(generation + 1, 0, 5)[0]) == 0


def test_settings_and_counters(store: SqliteDocumentStore) -> None:
    settings = CollectionSettings(Chunking(64, 8), 0, IndexKind.HNSW, 10, 1000)
    add_collection(store, "own", settings)
    put(store, "d", ["a", "bü"])
    put(store, "e", ["c"])
    delete(store, "e")
    put(store, "d", ["a", "bü", "c"])
    found = store.collections()
    assert list(found) == ["c", "own"]
    assert found["own"].settings == settings
    assert found["c"] == store.collection("c")
    assert (found["c"].num_documents, found["c"].text_bytes) == (1, len("a bü c".encode()))
    assert found["c"].serving is not None
    assert (found["c"].serving.num_documents, found["c"].serving.num_chunks) == (1, 3)
    assert found["c"].serving.recipe == RECIPE
    with store.transaction():
        store.put_fusion("c", '{"dense": 1}')
        store.commit()
    assert store.collections()["c"].fusion == '{"dense": 1}'


def test_a_quota_refuses_growth_and_nothing_else(store: SqliteDocumentStore) -> None:
    put(store, "d", ["abc"])
    put(store, "e", ["abc"])
    settings = CollectionSettings(max_documents=1, max_text_bytes=4)
    with store.transaction():
        store.put_collection("c", settings)
        store.commit()
    with pytest.raises(TooLarge, match="quota") as caught:
        put(store, "f", ["a"])
    assert caught.value.field == "document"
    with pytest.raises(TooLarge, match="quota of 4") as caught:
        put(store, "d", ["abcdef"])
    assert caught.value.field == "document.text"
    assert texts_of(store, "d") == ["abc"]
    put(store, "d", ["ab"])  # a smaller one is welcome, even above the quota
    delete(store, "e")
    put(store, "d", ["abcd"])


OTHER = replace(RECIPE, chunking=Chunking(32, 0))


def start_building(store: SqliteDocumentStore, recipe: object = OTHER) -> int:
    with store.transaction():
        generation = store.add_generation("c", recipe)  # type: ignore[arg-type]
        store.commit()
    return generation


def switch(store: SqliteDocumentStore) -> bool:
    with store.transaction():
        has_switched = store.switch_generation("c")
        store.commit()
    return has_switched


def test_a_collection_without_documents_serves_a_new_generation_at_once(
    store: SqliteDocumentStore,
) -> None:
    first, second = serving(store), start_building(store)
    found = store.collection("c")
    assert found is not None
    assert (serving(store), found.building, found.retired) == (second, None, (first,))


def test_a_generation_serves_when_every_document_is_prepared_in_it(
    store: SqliteDocumentStore,
) -> None:
    first = serving(store)
    put(store, "d", ["a", "b"])
    put(store, "e", ["c"])
    second = start_building(store)
    assert store.unprepared("c", second, "", 10) == ["d", "e"]
    assert store.unprepared("c", second, "d", 10) == ["e"]
    change = put_into(store, second, "d", chunks_of(["a b"]), "a b")
    assert change is not None
    assert change.removed == ()
    assert put_into(store, second, "d", chunks_of(["a b"]), "a b") is None
    assert put_into(store, second, "e", chunks_of(["c"]), "older text") is None
    assert not switch(store)
    assert serving(store) == first
    # A write changes both, so the building one is complete.
    both = put(store, "e", ["x"])
    assert [one.generation for one in both.indexes] == [first, second]
    assert switch(store)
    found = store.collection("c")
    assert found is not None
    assert (serving(store), found.building, found.retired) == (second, None, (first,))
    assert texts_of(store, "d") == ["a b"]
    listed = store.find("c", "d")
    assert listed is not None
    assert listed.num_chunks == 1


def test_retired_chunks_are_removed_in_steps_with_their_deletes(
    store: SqliteDocumentStore,
) -> None:
    first = serving(store)
    put(store, "d", ["a", "b"])
    put(store, "e", ["c"])
    second = start_building(store)
    put_into(store, second, "d", chunks_of(["a b"]), "a b")
    put_into(store, second, "e", chunks_of(["c"]), "c")
    assert switch(store)
    assert pending(store) == []
    num_documents = []
    deletes: list[OutboxDelete] = []
    while True:
        with store.transaction(frees_space=True):
            step = store.remove_retired(first, 1, NOW_MS)
            store.commit()
        num_documents.append(step.num_documents)
        deletes += step.deletes
        if not step.num_documents:
            break
    assert num_documents == [1, 1, 0]
    # The other document's only chunk is the same in both.
    [removed] = deletes
    assert (removed.document, removed.names_document) == ("d", True)
    assert set(removed.token_digests) == {digest_of_text("a"), digest_of_text("b")}
    found = store.collection("c")
    assert found is not None
    assert found.retired == ()
    assert len(store.rows(first)) == 0
    with store.transaction():
        assert store.remove_retired(first, 1, NOW_MS).num_documents == 0


def test_a_document_that_another_tokenizer_read_is_deleted_by_name_too(
    store: SqliteDocumentStore,
) -> None:
    put(store, "d", ["a", "b"])
    document = a_document("d", "a c")
    with store.transaction():
        chunks = {serving(store): chunks_of(["a", "c"], tokenizer="other")}
        change = store.replace(
            "c", document, version_of(document), chunks, now_ms=NOW_MS, claim=True
        )
        store.commit()
    [removed] = change.deletes
    assert removed.names_document
    assert removed.token_digests == (digest_of_text("b"),)


def test_a_building_generation_can_be_abandoned(store: SqliteDocumentStore) -> None:
    put(store, "d", ["a"])
    second = start_building(store)
    third = start_building(store, replace(RECIPE, embedder="third"))
    found = store.collection("c")
    assert found is not None
    assert found.building is not None
    assert (found.building.row, found.retired) == (third, (second,))
    with store.transaction():
        store.retire_building("c")
        store.commit()
    found = store.collection("c")
    assert found is not None
    assert (found.building, found.retired) == (None, (second, third))


def test_a_collection_is_deleted_in_steps(store: SqliteDocumentStore) -> None:
    add_collection(store, "other")
    put(store, "kept", ["a"], collection="other")
    for name in "abc":
        put(store, name, [name])
    with store.transaction():
        store.start_deleting("c")
        store.commit()
    assert store.collections()["c"].is_deleting
    steps = []
    while True:
        with store.transaction(frees_space=True):
            step = store.remove_documents("c", 2, NOW_MS)
            if not step.num_documents:
                store.drop_collection("c")
            store.commit()
        if not step.num_documents:
            break
        steps.append([(one.document, one.names_document) for one in step.deletes])
    assert steps == [[("a", True), ("b", True)], [("c", True)]]
    assert list(store.collections()) == ["other"]
    assert store.get("other", "kept") is not None
    for table in ("texts", "document_fields", "prepared", "embeddings", "chunks"):
        [(count,)] = store.database.query(f"SELECT count(*) FROM {table}")
        assert count == (0 if table == "document_fields" else 1)


def test_chunks_without_embeddings_are_found_by_words_only(store: SqliteDocumentStore) -> None:
    document = a_document("d", "zebra")
    with store.transaction():
        chunks = {serving(store): chunks_of(["zebra"], is_embedded=False)}
        store.replace("c", document, version_of(document), chunks, now_ms=NOW_MS, claim=False)
        store.commit()
    assert len(store.rows(serving(store))) == 0
    [hit] = store.lexical_hits(serving(store), ["zebras"], 10)
    assert store.positions([hit.row]) == {hit.row: ("d", 0)}


def test_listings_and_counters_read_no_text(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    add_collection(store, "c")
    for i in range(40):
        put(store, f"d{i:02}", ["word " * 4000])
    store.close()
    store = open_store(tmp_path)
    num_bytes = store.disk().used_bytes
    assert num_bytes > 40 * 2 * 20_000  # document and chunk
    page_bytes = store.database.read("PRAGMA page_size")[0][0]
    before = pages_read(tmp_path)
    store.collections()
    page, _ = store.page("c", "", 100)
    assert store.unprepared("c", serving(store), "", 10) == []
    store.rows(serving(store))
    read_bytes = pages_read(tmp_path) - before
    assert len(page) == 40
    assert 0 < read_bytes < num_bytes / 10
    assert page_bytes == 4096
    store.close()


def pages_read(folder: Path) -> int:
    """Return the bytes that this process has read so far, from disk or from the page cache."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


def test_a_second_process_gets_a_clear_error(store: SqliteDocumentStore, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="in use by another retriever"):
        open_store(tmp_path)


def test_a_folder_is_free_after_close(tmp_path: Path) -> None:
    for _ in range(2):
        open_store(tmp_path).close()


def test_another_schema_is_refused(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(InvalidInput, match=r"schema 2.*reads 3"):
        open_store(tmp_path)


def test_a_file_of_another_application_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    with pytest.raises(InvalidInput, match="not written by a retriever"):
        open_store(tmp_path)
