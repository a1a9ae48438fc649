"""A backup is a consistent copy, and a restore replaces the documents as a whole."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_retriever.store.sqlite.document_store import SqliteStore, open_sqlite
from ragcache_retriever.store.sqlite.files.backup import (
    INDEXES_FOLDER,
    RESTORE_READY,
    IncomingBackup,
    SqliteBackups,
)
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from tests.kit.stored_documents import NOW_MS, add_collection, delete, put


def open_store(folder: Path) -> SqliteStore:
    return open_sqlite(folder, DiskReserve(folder, 0))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    store = open_store(tmp_path / "source")
    add_collection(store, "c")
    yield store
    store.database.close()


def copy_of(store: SqliteStore) -> bytes:
    return b"".join(SqliteBackups(store.database.folder).backup())


def receive(folder: Path, content: bytes) -> int:
    folder.mkdir(exist_ok=True)
    incoming = IncomingBackup(folder)
    try:
        for first in range(0, len(content), 1000):
            incoming.write(content[first : first + 1000])
        return incoming.finish()
    finally:
        incoming.abort()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_backup_is_restored_with_its_embeddings(store: SqliteStore, tmp_path: Path) -> None:
    change = put(store, "d", ["a", "b"])
    parts = list(SqliteBackups(store.database.folder).backup())
    assert all(0 < len(part) <= 1 << 20 for part in parts)
    target = tmp_path / "target"
    with_other = open_store(target)
    add_collection(with_other, "other")
    with_other.database.close()
    (target / INDEXES_FOLDER / "1").mkdir(parents=True)
    assert receive(target, b"".join(parts)) == 1
    restored = open_store(target)
    assert list(restored.collections.all()) == ["c"]
    stored = restored.reads.get("c", "d")
    assert stored is not None
    assert stored.document.text == "a b"
    generation = change.indexes[0].generation
    assert restored.embeddings.rows(generation).tolist() == list(change.indexes[0].added)
    assert restored.lexical.hits(generation, ["b"], 5)
    assert not (target / INDEXES_FOLDER).exists()
    assert RESTORE_READY not in names(target)
    put(restored, "e", ["c"])
    restored.database.close()


def test_a_restore_deletes_all_stored_kv(store: SqliteStore) -> None:
    put(store, "d", ["a"])
    content = copy_of(store)
    put(store, "later", ["b"])
    delete(store, "later")
    folder = store.database.folder
    store.database.close()
    receive(folder, content)
    store.database.__init__(folder, DiskReserve(folder, 0))  # type: ignore[misc]  # the fixture closes it
    with store.database.transaction():
        [everything] = store.outbox.claim(10, NOW_MS).deletes
    assert everything.everything
    # Gateways that have seen later removals notice that the numbers begin again.
    assert store.outbox.removals(0, 10) == ([], 1)


def test_a_copy_without_its_old_file_is_installed_too(store: SqliteStore, tmp_path: Path) -> None:
    """The process may have ended after it removed the old file."""
    put(store, "d", ["a"])
    receive(tmp_path / "target", copy_of(store))
    restored = open_store(tmp_path / "target")
    assert restored.reads.get("c", "d") is not None
    restored.database.close()


def test_a_backup_is_consistent_while_documents_are_written(
    store: SqliteStore,
) -> None:
    stopped = threading.Event()
    put(store, "d0", ["a", "b"])
    copies = []

    def back_up() -> None:
        while not stopped.is_set():
            copies.append(copy_of(store))

    thread = threading.Thread(target=back_up)
    thread.start()
    for i in range(200):
        put(store, f"d{i % 7}", ["a" * i, "b"])
    stopped.set()
    thread.join()
    assert copies
    for number, content in enumerate(copies[:5]):
        folder = store.database.folder / f"copy{number}"
        receive(folder, content)
        restored = open_store(folder)
        [collection] = restored.collections.all().values()
        assert collection.serving is not None
        [(num_chunks,)] = restored.database.query("SELECT count(*) FROM chunks")
        assert collection.serving.num_chunks == num_chunks == 2 * collection.num_documents
        restored.database.close()


def test_content_that_is_no_backup_is_refused(store: SqliteStore, tmp_path: Path) -> None:
    put(store, "d", ["word " * 5000])
    content = copy_of(store)
    half = len(content) // 2
    damaged = content[:half] + bytes(range(256)) * 64 + content[half + 256 * 64 :]
    for wrong in (b"", b"no database" * 1000, content[:half], damaged):
        with pytest.raises(InvalidInput, match="backup"):
            receive(tmp_path / "target", wrong)
        assert names(tmp_path / "target") == set()


def test_one_backup_runs_at_a_time_and_leaves_nothing(store: SqliteStore) -> None:
    copies = SqliteBackups(store.database.folder)
    before = names(store.database.folder)
    first = copies.backup()
    next(first)
    with pytest.raises(Unavailable, match="another backup"):
        next(copies.backup())
    first.close()
    assert names(store.database.folder) == before
    assert next(copies.backup())


def test_a_backup_needs_disk_space(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(Unavailable, match="bytes of free disk space, and 1 are free"):
        next(SqliteBackups(store.database.folder).backup())


def test_one_backup_is_received_at_a_time(store: SqliteStore, tmp_path: Path) -> None:
    put(store, "d", ["a"])
    first = IncomingBackup(tmp_path)
    with pytest.raises(Unavailable, match="another backup"):
        IncomingBackup(tmp_path)
    first.write(copy_of(store))
    assert first.finish() == 1
    second = IncomingBackup(tmp_path)
    first.abort()  # it is finished, and takes nothing from the other one
    second.write(b"no backup")
    second.abort()
    assert names(tmp_path) == {"source", RESTORE_READY}


def test_a_restored_backup_that_was_damaged_since_is_ignored(
    store: SqliteStore,
) -> None:
    put(store, "d", ["a"])
    folder = store.database.folder
    store.database.close()
    (folder / RESTORE_READY).write_bytes(b"no database" * 1000)
    store.database.__init__(folder, DiskReserve(folder, 0))  # type: ignore[misc]  # the fixture closes it
    assert store.reads.get("c", "d") is not None
    assert RESTORE_READY not in names(folder)
