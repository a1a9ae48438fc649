"""What can be read of a damaged file is kept, and what is lost is told."""

from __future__ import annotations

import random
import shutil
import sqlite3
import threading
from pathlib import Path

import pytest

from ragcache_core.errors import Unavailable
from ragcache_retriever.store.outbox import CLAIM_MS
from ragcache_retriever.store.sqlite.database import DAMAGE_MARKER
from ragcache_retriever.store.sqlite.document_store import SqliteDocumentStore
from ragcache_retriever.store.sqlite.files.check import find_damage
from ragcache_retriever.store.sqlite.files.recovery import (
    DAMAGED_NAME,
    RecoveryFailed,
    has_recovered_lately,
)
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from ragcache_retriever.store.sqlite.schema import FILE_NAME
from tests.kit.stored_documents import NOW_MS, add_collection, delete, put

NUM_DOCUMENTS = 120
PAGE_BYTES = 4096


def open_store(folder: Path) -> SqliteDocumentStore:
    return SqliteDocumentStore(folder, DiskReserve(folder, 0))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filled")
    store = open_store(folder)
    add_collection(store, "c")
    for i in range(NUM_DOCUMENTS):
        put(
            store,
            f"d{i:03}",
            [f"text {i} part {j} " * 20 for j in range(3)],
            metadata={"n": str(i)},
        )
    delete(store, "d000")
    store.close()
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


def mark(folder: Path) -> None:
    (folder / DAMAGE_MARKER).write_text("found by a check")


@pytest.mark.parametrize("table", ["chunks", "embeddings", "chunks_by_digest", "prepared"])
def test_damage_of_what_follows_from_documents_loses_none(folder: Path, table: str) -> None:
    pages = pages_of(folder, table)
    damage(folder, pages[:: max(1, len(pages) // 3)])
    mark(folder)
    store = open_store(folder)
    page, _ = store.page("c", "", 1000)
    assert [one.document.id for one in page] == [f"d{i:03}" for i in range(1, NUM_DOCUMENTS)]
    [collection] = store.collections().values()
    assert collection.serving is not None
    unprepared = store.unprepared("c", collection.serving.row, "", 1000)
    assert collection.serving.num_documents == NUM_DOCUMENTS - 1 - len(unprepared)
    assert bool(unprepared) == (table != "chunks_by_digest")
    assert collection.serving.num_chunks == 3 * collection.serving.num_documents
    assert find_damage(folder / FILE_NAME, threading.Event()) is None
    assert has_recovered_lately(folder)
    assert (folder / DAMAGED_NAME).exists()
    assert not (folder / DAMAGE_MARKER).exists()
    # Nothing was lost, so the deletes that were pending still are.
    with store.transaction():
        [deletion] = store.outbox.claim(10, NOW_MS + CLAIM_MS + 1).deletes
    assert (deletion.document, deletion.everything) == ("d000", False)
    hits = store.lexical_hits(collection.serving.row, ["part"], 1000)
    assert len(hits) == collection.serving.num_chunks
    put(store, "d001", ["new"])
    store.close()


def test_lost_documents_are_counted_and_their_kv_is_deleted(folder: Path) -> None:
    damage(folder, pages_of(folder, "texts")[2:4])
    mark(folder)
    store = open_store(folder)
    page, _ = store.page("c", "", 1000)
    assert NUM_DOCUMENTS / 2 < len(page) < NUM_DOCUMENTS - 1
    assert all(store.get("c", one.document.id) for one in page)
    assert store.collections()["c"].num_documents == len(page)
    with store.transaction():
        [everything] = store.outbox.claim(10, NOW_MS).deletes
    assert everything.everything
    store.close()


def test_a_file_that_cannot_be_opened_is_refused_with_the_command_to_restore_it(
    folder: Path,
) -> None:
    damage(folder, [0])
    content = (folder / FILE_NAME).read_bytes()
    for _ in range(2):
        with pytest.raises(RecoveryFailed, match="run 'ragcache restore FILE'"):
            open_store(folder)
        assert (folder / FILE_NAME).read_bytes() == content


def test_damage_that_a_read_finds_is_recovered_at_the_next_start(folder: Path) -> None:
    damage(folder, pages_of(folder, "chunks"))
    store = open_store(folder)
    [collection] = store.collections().values()
    assert collection.serving is not None
    with pytest.raises(Unavailable, match="restart it to recover them"):
        store.neighbourhoods(store.rows(collection.serving.row).tolist(), 1)
    store.close()
    assert (folder / DAMAGE_MARKER).exists()
    store = open_store(folder)
    assert len(store.unprepared("c", collection.serving.row, "", 1000)) == NUM_DOCUMENTS - 1
    store.close()


def test_the_check_finds_damage_and_can_be_stopped(folder: Path) -> None:
    stopped = threading.Event()
    assert find_damage(folder / FILE_NAME, stopped) is None
    damage(folder, pages_of(folder, "texts")[:1])
    assert find_damage(folder / FILE_NAME, stopped)
    stopped.set()
    assert find_damage(folder / FILE_NAME, stopped) is None


@pytest.mark.parametrize("seed", range(8))
def test_no_damage_ends_a_start_otherwise(folder: Path, seed: int) -> None:
    """A start with random damage works, or asks for a backup; it never ends in another error."""
    rng = random.Random(seed)
    num_pages = (folder / FILE_NAME).stat().st_size // PAGE_BYTES
    damage(folder, rng.sample(range(1, num_pages), 6))
    mark(folder)
    try:
        store = open_store(folder)
    except RecoveryFailed:
        return
    for one in store.page("c", "", 1000)[0] if store.collections() else []:
        assert store.get("c", one.document.id) is not None
    assert find_damage(folder / FILE_NAME, threading.Event()) is None
    store.close()
