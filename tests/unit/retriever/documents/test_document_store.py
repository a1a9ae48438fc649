"""The document store owns one folder, and a transaction is applied as a whole or not at all."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_core.identity.keys import KEY_BYTES
from ragcache_retriever.documents.chunking import Chunk
from ragcache_retriever.documents.collection import Chunking, CollectionSettings
from ragcache_retriever.documents.document_store import (
    FILE_NAME,
    ChunkChange,
    Document,
    DocumentStore,
    Recipe,
    StoredDocument,
)
from ragcache_retriever.documents.outbox import OutboxDelete

RECIPE = Recipe("chunker", "embedder")
NOW_MS = 1_700_000_000_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DocumentStore]:
    store = DocumentStore(tmp_path)
    with store.transaction():
        store.put_collection("c", CollectionSettings())
        store.commit()
    yield store
    store.close()


def digest_of(text: str) -> bytes:
    return text.encode().ljust(KEY_BYTES, b".")


def a_document(document_id: str, text: str = "text", **fields: object) -> Document:
    values = {"title": document_id, "content_type": 1, "metadata": {}} | fields
    return Document(document_id, text=text, **values)  # type: ignore[arg-type]


def as_stored(document: Document, recipe: Recipe = RECIPE, num_chunks: int = 0) -> StoredDocument:
    return StoredDocument(document, document.content_hash(), recipe, num_chunks, 7)


def put(
    store: DocumentStore,
    document_id: str,
    texts: Sequence[str],
    *,
    collection: str = "c",
    recipe: Recipe = RECIPE,
    claim: bool = False,
    commit: bool = True,
) -> ChunkChange:
    chunks = [Chunk(text, ("A", "B")) for text in texts]
    vectors = np.full((len(texts), 4), 0.5, np.float32)
    with store.transaction():
        stored = as_stored(a_document(document_id, " ".join(texts)), recipe, len(chunks))
        change = store.replace(
            collection,
            stored,
            chunks,
            [digest_of(text) for text in texts],
            vectors,
            now_ms=NOW_MS,
            claim=claim,
        )
        if commit:
            store.commit()
    return change


def delete(store: DocumentStore, document_id: str) -> ChunkChange | None:
    with store.transaction():
        change = store.delete("c", document_id, NOW_MS)
        store.commit()
    return change


def test_what_was_put_is_read_back(store: DocumentStore) -> None:
    document = a_document("d", "body", title="T", content_type=2, metadata={"k": "v", "ü": ""})
    with store.transaction():
        no_vectors = np.empty((0, 4), np.float32)
        store.replace("c", as_stored(document), [], [], no_vectors, now_ms=NOW_MS, claim=False)
        store.commit()
    assert store.get("c", "d") == as_stored(document)
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
def test_the_content_hash_sees_every_part(other: Document) -> None:
    assert a_document("d").content_hash() == a_document("e", title="d").content_hash()
    assert a_document("d").content_hash() != other.content_hash()


def test_an_uncommitted_change_never_happened(store: DocumentStore) -> None:
    put(store, "d", ["one"])
    put(store, "d", ["two"], commit=False)
    assert [chunk.text for chunk, _ in store.embedded("c", "d")] == ["one"]


def test_an_error_inside_a_transaction_undoes_it(store: DocumentStore) -> None:
    def fail() -> None:
        with store.transaction():
            store.delete("c", "d", NOW_MS)
            raise KeyError

    put(store, "d", ["one"])
    with pytest.raises(KeyError):
        fail()
    assert store.get("c", "d") is not None
    put(store, "e", ["two"])


def test_a_write_that_the_disk_refuses_is_unavailable(store: DocumentStore) -> None:
    pages = store._writer.execute("PRAGMA page_count").fetchone()[0]
    store._writer.execute(f"PRAGMA max_page_count = {pages + 1}")
    with pytest.raises(Unavailable, match="full"):
        put(store, "d", ["x" * 100_000])
    assert store.get("c", "d") is None


def acknowledge(store: DocumentStore, deletes: Sequence[OutboxDelete]) -> None:
    with store.transaction():
        store.outbox.acknowledge([], [one.id for one in deletes], NOW_MS)
        store.commit()


def removed_digests(change: ChunkChange) -> list[bytes]:
    return [digest for delete in change.deletes for digest in delete.token_digests]


def test_removed_digests_are_those_of_no_other_chunk_in_the_collection(
    store: DocumentStore,
) -> None:
    with store.transaction():
        store.put_collection("other", CollectionSettings())
        store.commit()
    put(store, "elsewhere", ["b"], collection="other")
    put(store, "d", ["a", "b", "c", "b"])
    put(store, "e", ["c"])
    replacement = put(store, "d", ["a", "new"])
    assert removed_digests(replacement) == [digest_of("b")]
    acknowledge(store, replacement.deletes)
    change = delete(store, "d")
    assert change is not None
    assert removed_digests(change) == [digest_of("a"), digest_of("new")]
    assert delete(store, "d") is None


def pending(store: DocumentStore) -> list[OutboxDelete]:
    with store.transaction():
        claim = store.outbox.claim(1000, NOW_MS)
        store.commit()
    return list(claim.deletes)


def test_a_change_and_its_deletes_are_one_transaction(store: DocumentStore) -> None:
    put(store, "d", ["a"])
    with store.transaction():
        store.delete("c", "d", NOW_MS)
    assert store.removals(0, 10) == ([], 0)
    assert pending(store) == []
    put(store, "d", ["b"])
    [update] = pending(store)
    assert (update.token_digests, update.names_document) == ((digest_of("a"),), False)
    delete(store, "d")
    with store.transaction():
        [deletion] = store.outbox.claim_of("c", "d", NOW_MS, is_repeated=True)[1:]
    assert (deletion.token_digests, deletion.names_document) == ((digest_of("b"),), True)
    removals, last = store.removals(0, 10)
    assert [(one.collection, one.document) for one in removals] == [("c", "d")] * 2
    assert removals[-1].sequence == last


def test_a_change_returns_earlier_deletes_of_the_document_that_no_shard_has(
    store: DocumentStore,
) -> None:
    put(store, "d", ["a"])
    put(store, "other", ["x"])
    put(store, "other", ["y"])
    first = put(store, "d", ["b"])  # its gateway may have ended
    second = put(store, "d", ["c"], claim=True)
    assert set(removed_digests(second)) == {digest_of("a"), digest_of("b")}
    assert put(store, "d", ["c"], claim=True).deletes == second.deletes  # removes nothing itself
    acknowledge(store, first.deletes)
    deletion = delete(store, "d")
    assert deletion is not None
    assert set(removed_digests(deletion)) == {digest_of("b"), digest_of("c")}


def test_a_document_that_another_chunker_splits_is_deleted_by_name_too(
    store: DocumentStore,
) -> None:
    put(store, "d", ["a", "b"])
    put(store, "d", ["a", "b"], recipe=Recipe("chunker", "other"))
    put(store, "d", ["a", "b"], recipe=Recipe("other", "other"))
    assert pending(store) == []  # no text was removed
    put(store, "d", ["a b"], recipe=RECIPE)
    [delete] = pending(store)
    assert delete.names_document
    assert set(delete.token_digests) == {digest_of("a"), digest_of("b")}


def test_the_outbox_survives_a_restart(store: DocumentStore, tmp_path: Path) -> None:
    put(store, "d", ["a"])
    delete(store, "d")
    store.close()
    store.__init__(tmp_path)  # type: ignore[misc]  # the fixture closes it
    with store.transaction():
        [deletion] = store.outbox.claim_of("c", "d", NOW_MS, is_repeated=True)
    assert deletion.token_digests == (digest_of("a"),)


def test_rows_are_never_reused(store: DocumentStore) -> None:
    first = put(store, "d", ["a", "b"])
    second = put(store, "d", ["c"])
    assert second.removed == first.added
    assert min(second.added) > max(first.added)


def test_neighbours_stay_within_their_document(store: DocumentStore) -> None:
    rows = put(store, "d", ["0", "1", "2", "3", "4"]).added
    others = put(store, "e", ["5"]).added
    found = store.neighbourhoods([rows[2], rows[0], others[0], 10**9], window=1)
    assert {row: (n.chunk.text, n.before, n.after) for row, n in found.items()}.keys() == {
        rows[2],
        rows[0],
        others[0],
    }
    middle = found[rows[2]]
    assert [c.text for c in (*middle.before, middle.chunk, *middle.after)] == ["1", "2", "3"]
    assert middle.chunk.heading_path == ("A", "B")
    assert not found[rows[0]].before
    assert not found[others[0]].before
    assert not found[others[0]].after


def test_pages_follow_each_other(store: DocumentStore) -> None:
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


def test_embeddings_come_back_for_their_embedder(store: DocumentStore) -> None:
    rows = put(store, "d", ["a", "b"]).added
    put(store, "e", ["c"], recipe=Recipe("chunker", "other"))
    found, vectors = store.embeddings("c", "embedder")
    assert tuple(found) == rows
    assert vectors.tolist() == [[0.5] * 4] * 2
    assert len(store.embeddings("c", "unknown")[0]) == 0
    assert store.stale("c", RECIPE) == ["e"]
    assert store.stale("c", Recipe("new", "embedder")) == ["d", "e"]


def test_settings_and_counts(store: DocumentStore) -> None:
    settings = CollectionSettings(Chunking(64, 8), window=0)
    with store.transaction():
        store.put_collection("own", settings)
        store.commit()
    assert store.collections() == {"c": CollectionSettings(), "own": settings}
    put(store, "d", ["a", "b"])
    assert store.counts("c") == (1, 2)
    assert store.counts("own") == (0, 0)


def test_a_second_process_gets_a_clear_error(store: DocumentStore, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="in use by another retriever"):
        DocumentStore(tmp_path)


def test_a_folder_is_free_after_close(tmp_path: Path) -> None:
    for _ in range(2):
        DocumentStore(tmp_path).close()


def test_another_schema_is_refused(tmp_path: Path) -> None:
    DocumentStore(tmp_path).close()
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(InvalidInput, match=r"schema 99.*reads 2"):
        DocumentStore(tmp_path)


def test_a_file_of_another_application_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    with pytest.raises(InvalidInput, match="not written by a retriever"):
        DocumentStore(tmp_path)
    (tmp_path / FILE_NAME).write_bytes(b"no database" * 1000)
    with pytest.raises(InvalidInput, match="cannot be opened"):
        DocumentStore(tmp_path)
