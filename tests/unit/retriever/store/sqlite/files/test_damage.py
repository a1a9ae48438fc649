"""A damaged file is moved aside whole, and no documents are served until a user decides."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
import threading
from pathlib import Path

import pytest

from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.sqlite.document_store import open_sqlite
from ragcache_retriever.store.sqlite.files.backup import (
    DAMAGED_NAME,
    INDEXES_FOLDER,
    IncomingBackup,
    backup_parts,
)
from ragcache_retriever.store.sqlite.files.damage import (
    MARKER_NAME,
    DocumentsDamaged,
    find_damage,
    until_removed,
)
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from ragcache_retriever.store.sqlite.schema import FILE_NAME
from tests.kit.stored_documents import NOW_MS, add_collection, put
from tests.kit.wait import let_tasks_begin

NUM_DOCUMENTS = 40
PAGE_BYTES = 4096


def open_store(folder: Path) -> DocumentStore:
    return open_sqlite(folder, DiskReserve(folder, 0))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filled")
    store = open_store(folder)
    add_collection(store, "c")
    for i in range(NUM_DOCUMENTS):
        put(store, f"d{i:03}", [f"text {i} part {j} " * 20 for j in range(3)])
    store.database.close()
    return folder


@pytest.fixture
def folder(filled: Path, tmp_path: Path) -> Path:
    return shutil.copytree(filled, tmp_path / "documents")


def pages_of(folder: Path, table: str) -> list[int]:
    """Return the leaf pages of a table, from 0."""
    connection = sqlite3.connect(folder / FILE_NAME)
    found = connection.execute(
        "SELECT pageno - 1 FROM dbstat WHERE name = ? AND pagetype = 'leaf'", (table,)
    ).fetchall()
    connection.close()
    return [page for (page,) in found]


def damage(folder: Path, pages: list[int]) -> None:
    with (folder / FILE_NAME).open("r+b") as file:
        for page in pages:
            file.seek(page * PAGE_BYTES)
            file.write(b"\xff" * PAGE_BYTES)


def test_a_damaged_file_is_moved_aside_and_refused_at_each_start(folder: Path) -> None:
    damage(folder, [0])
    content = (folder / FILE_NAME).read_bytes()
    (folder / INDEXES_FOLDER).mkdir()
    for _ in range(2):
        with pytest.raises(DocumentsDamaged, match="'ragcache restore FILE' with a backup, or rem"):
            open_store(folder)
        assert (folder / DAMAGED_NAME).read_bytes() == content
    assert not (folder / INDEXES_FOLDER).exists()


def test_without_the_file_the_store_is_empty_and_deletes_all_stored_kv(folder: Path) -> None:
    damage(folder, [0])
    with pytest.raises(DocumentsDamaged):
        open_store(folder)
    (folder / DAMAGED_NAME).unlink()
    store = open_store(folder)
    assert store.collections.all() == {}
    with store.database.transaction():
        [everything] = store.outbox.claim(10, NOW_MS).deletes
    assert everything.everything
    add_collection(store, "c")
    put(store, "d001", ["new"])
    store.database.close()


def test_a_restored_backup_replaces_the_damaged_file(filled: Path, folder: Path) -> None:
    damage(folder, [0])
    with pytest.raises(DocumentsDamaged):
        open_store(folder)
    incoming = IncomingBackup(folder)
    for part in backup_parts(filled / FILE_NAME):
        incoming.write(part)
    assert incoming.finish() == NUM_DOCUMENTS
    store = open_store(folder)
    assert len(store.reads.page("c", "", 1000)[0]) == NUM_DOCUMENTS
    assert not (folder / DAMAGED_NAME).exists()
    store.database.close()


def test_changes_that_are_only_in_the_log_are_moved_with_the_file(folder: Path) -> None:
    store = open_store(folder)
    put(store, "last", ["only in the log"])
    copied = shutil.copytree(folder, folder.parent / "killed")
    store.database.close()
    damage(copied, pages_of(copied, "chunks_by_digest"))
    (copied / MARKER_NAME).touch()
    with pytest.raises(DocumentsDamaged):
        open_store(copied)
    aside = sqlite3.connect(copied / DAMAGED_NAME)
    assert aside.execute("SELECT 1 FROM documents WHERE id = 'last'").fetchone()
    aside.close()


def test_damage_that_a_read_finds_is_moved_aside_at_the_next_start(folder: Path) -> None:
    damage(folder, pages_of(folder, "chunks"))
    store = open_store(folder)
    [collection] = store.collections.all().values()
    assert collection.serving is not None
    with pytest.raises(DocumentsDamaged, match="restart the retriever"):
        store.reads.neighbourhoods(store.embeddings.rows(collection.serving.row).tolist(), 1)
    store.database.close()
    assert (folder / MARKER_NAME).exists()
    with pytest.raises(DocumentsDamaged, match="moved to"):
        open_store(folder)


def test_a_start_that_ended_before_it_removed_the_marker_loses_no_log(folder: Path) -> None:
    damage(folder, [0])
    with pytest.raises(DocumentsDamaged):
        open_store(folder)
    (folder / FILE_NAME).unlink()
    (folder / MARKER_NAME).touch()
    (folder / f"{FILE_NAME}-wal").write_bytes(b"changes")
    with pytest.raises(DocumentsDamaged):
        open_store(folder)
    assert (folder / f"{DAMAGED_NAME}-wal").read_bytes() == b"changes"
    (folder / DAMAGED_NAME).unlink()
    store = open_store(folder)
    with store.database.transaction():
        assert store.outbox.claim(10, NOW_MS).deletes[0].everything
    store.database.close()
    assert not (folder / f"{DAMAGED_NAME}-wal").exists()


def test_an_index_of_a_table_that_lacks_a_row_is_damage_at_a_marked_start(folder: Path) -> None:
    connection = sqlite3.connect(folder / FILE_NAME)
    connection.execute("PRAGMA writable_schema = ON")
    where = "name = 'chunks_by_digest'"
    [(sql,)] = connection.execute(f"SELECT sql FROM sqlite_master WHERE {where}").fetchall()
    connection.execute(f"UPDATE sqlite_master SET sql = sql || ' WHERE row < 0' WHERE {where}")
    connection.commit()
    connection.close()
    connection = sqlite3.connect(folder / FILE_NAME)
    connection.execute("REINDEX chunks_by_digest")
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute(f"UPDATE sqlite_master SET sql = ? WHERE {where}", (sql,))
    connection.commit()
    connection.close()
    assert find_damage(folder / FILE_NAME, threading.Event()) is None
    (folder / MARKER_NAME).touch()
    with pytest.raises(DocumentsDamaged, match="moved to"):
        open_store(folder)


def test_a_new_file_does_not_use_the_indexes_of_an_earlier_one(folder: Path) -> None:
    for path in folder.glob(f"{FILE_NAME}*"):
        path.unlink()
    (folder / INDEXES_FOLDER).mkdir()
    open_store(folder).database.close()
    assert not (folder / INDEXES_FOLDER).exists()


def test_a_marked_file_without_damage_is_opened(folder: Path) -> None:
    (folder / MARKER_NAME).touch()
    store = open_store(folder)
    assert len(store.reads.page("c", "", 1000)[0]) == NUM_DOCUMENTS
    assert not (folder / MARKER_NAME).exists()
    store.database.close()


def test_the_check_finds_damage_and_can_be_stopped(folder: Path) -> None:
    stopped = threading.Event()
    assert find_damage(folder / FILE_NAME, stopped) is None
    damage(folder, pages_of(folder, "texts")[:1])
    assert find_damage(folder / FILE_NAME, stopped)
    stopped.set()
    assert find_damage(folder / FILE_NAME, stopped) is None


async def test_the_removal_of_the_file_is_noticed(tmp_path: Path) -> None:
    removed = asyncio.Event()
    (tmp_path / DAMAGED_NAME).touch()
    watching = asyncio.create_task(until_removed(tmp_path, removed))
    await let_tasks_begin()
    assert not removed.is_set()
    (tmp_path / DAMAGED_NAME).unlink()
    await asyncio.wait_for(removed.wait(), 60)
    await watching


@pytest.mark.parametrize("seed", range(8))
def test_no_damage_ends_a_start_otherwise(folder: Path, seed: int) -> None:
    """A marked file with random damage is opened if it has none, and refused otherwise."""
    rng = random.Random(seed)
    num_pages = (folder / FILE_NAME).stat().st_size // PAGE_BYTES
    damage(folder, rng.sample(range(1, num_pages), 6))
    (folder / MARKER_NAME).touch()
    try:
        store = open_store(folder)
    except DocumentsDamaged:
        return
    assert find_damage(folder / FILE_NAME, threading.Event()) is None
    store.database.close()
