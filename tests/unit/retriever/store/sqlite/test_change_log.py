"""A follower that repeats each transaction has the same documents."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_retriever.documents.collection import Chunking
from ragcache_retriever.store.change_log import AppliedChange, ChangedRows, CommittedChange
from ragcache_retriever.store.sqlite.change_log import MIN_KEPT_CHANGES, SqliteChangeLog
from ragcache_retriever.store.sqlite.document_store import SqliteDocumentStore
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from tests.kit.memory_database import MemoryDatabase
from tests.kit.stored_documents import (
    NOW_MS,
    RECIPE,
    add_collection,
    chunks_of,
    delete,
    put,
    put_into,
)


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[SqliteDocumentStore]:
    store = SqliteDocumentStore(folder, DiskReserve(folder, 0))
    store.changes.keep_changes(True)
    try:
        yield store
    finally:
        store.close()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[SqliteDocumentStore]:
    with opened(tmp_path / "writer") as store:
        yield store


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[SqliteDocumentStore]:
    with opened(tmp_path / "follower") as store:
        yield store


def contents(store: SqliteDocumentStore) -> dict[str, list[str]]:
    """Return the rows of all tables, those of the full-text index included."""
    tables = store.database.query(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE '%VIRTUAL%'"
    )
    return {
        table: sorted(map(str, store.database.query(f"SELECT * FROM {table}")))
        for (table,) in tables
    }


def catch_up(follower: SqliteDocumentStore, writer: SqliteDocumentStore) -> list[AppliedChange]:
    changes = writer.changes.changes_after(follower.changes.sequence, 1 << 30)
    assert changes is not None
    return [follower.changes.apply_change(change) for change in changes]


def test_a_follower_has_the_same_documents(
    writer: SqliteDocumentStore, follower: SqliteDocumentStore
) -> None:
    rng = random.Random(7)
    serving = add_collection(writer, "c")
    for i in range(60):
        name = f"d{rng.randrange(8)}"
        if rng.random() < 0.3:
            delete(writer, name)
        else:
            put(writer, name, [f"word{rng.randrange(30)}" for _ in range(rng.randrange(1, 5))])
        with writer.transaction():
            claim = writer.outbox.claim(3, NOW_MS + i * 20_000)
            writer.outbox.acknowledge([one.id for one in claim.deletes[:1]], [], NOW_MS)
            writer.commit()
    with writer.transaction():
        building = writer.add_generation("c", replace(RECIPE, chunking=Chunking(32, 0)))
        writer.commit()
    for name in writer.unprepared("c", building, "", 100):
        text = writer.get("c", name)
        assert text is not None
        put_into(writer, building, name, chunks_of([text.document.text]), text.document.text)
    with writer.transaction():
        assert writer.switch_generation("c")
        writer.remove_retired(serving, 2, NOW_MS)
        writer.put_report("quality", b"\0report", NOW_MS)
        writer.commit()
    catch_up(follower, writer)
    assert contents(follower) == contents(writer)
    assert follower.changes.sequence == writer.changes.sequence > 60
    words = [f"word{i}" for i in range(30)]
    assert follower.lexical_hits(building, words, 100) == writer.lexical_hits(building, words, 100)


def test_a_follower_learns_which_vectors_have_changed(
    writer: SqliteDocumentStore, follower: SqliteDocumentStore
) -> None:
    generation = add_collection(writer, "c")
    first = put(writer, "d", ["a", "b"]).indexes[0]
    second = put(writer, "d", ["c"]).indexes[0]
    created, *writes = catch_up(follower, writer)
    assert created == AppliedChange((), has_other_collections=True)
    assert writes == [
        AppliedChange((ChangedRows(generation, (), first.added),), False),
        AppliedChange((ChangedRows(generation, first.added, second.added),), False),
    ]


def test_a_transaction_that_changes_nothing_has_no_number(writer: SqliteDocumentStore) -> None:
    add_collection(writer, "c")
    before = writer.changes.sequence
    with writer.transaction():
        writer.outbox.claim(10, NOW_MS)
        writer.commit()
    assert delete(writer, "missing") is None
    assert writer.changes.sequence == before


def test_commits_are_told_in_order(writer: SqliteDocumentStore) -> None:
    told: list[CommittedChange] = []
    writer.changes.on_commit(told.append)
    add_collection(writer, "c")
    put(writer, "d", ["a"])
    put(writer, "d", ["b"], commit=False)
    delete(writer, "d")
    assert [one.sequence for one in told] == [1, 2, 3]
    assert told == writer.changes.changes_after(0, 1 << 30)


def test_changes_that_do_not_follow_are_refused(
    writer: SqliteDocumentStore, follower: SqliteDocumentStore
) -> None:
    writer.changes.start_epoch(2)
    add_collection(writer, "c")
    put(writer, "d", ["a"])
    first, second = writer.changes.changes_after(0, 1 << 30) or []
    with pytest.raises(InvalidInput, match="does not follow"):
        follower.changes.apply_change(second)
    with pytest.raises(InvalidInput, match="not an encoded"):
        follower.changes.apply_change(replace(first, statements=b"bytes of anything"))
    assert follower.changes.sequence == 0
    follower.changes.apply_change(first)
    with pytest.raises(InvalidInput, match="does not follow"):
        follower.changes.apply_change(replace(second, epoch=1))
    with pytest.raises(Unavailable, match="epoch 2 has replaced epoch 1"):
        follower.changes.start_epoch(1)
    follower.changes.apply_change(second)
    # A follower can serve others, and become the writer.
    assert follower.changes.changes_after(0, 1 << 30) == [first, second]


def test_numbers_continue_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.changes.start_epoch(3)
        add_collection(store, "c")
    with opened(tmp_path) as store:
        assert (store.changes.sequence, store.changes.epoch) == (1, 3)
        put(store, "d", ["a"])
        assert [one.sequence for one in store.changes.changes_after(0, 1 << 30) or []] == [1, 2]


def test_changes_before_the_kept_ones_are_asked_for_in_vain(writer: SqliteDocumentStore) -> None:
    add_collection(writer, "c")
    writer.changes.keep_changes(False)
    put(writer, "d", ["a"])
    assert writer.changes.changes_after(0, 1 << 30) is None
    assert writer.changes.changes_after(2, 1 << 30) == []
    writer.changes.keep_changes(True)
    put(writer, "d", ["b"])
    assert writer.changes.changes_after(1, 1 << 30) is None
    assert [one.sequence for one in writer.changes.changes_after(2, 1 << 30) or []] == [3]
    assert writer.changes.changes_after(4, 1 << 30) is None  # of another writer


def test_the_log_is_bounded_in_bytes_and_age() -> None:
    now = [1_000_000.0]
    database = MemoryDatabase()
    log = SqliteChangeLog(database, max_kept_bytes=1100, max_kept_ms=5000, clock=lambda: now[0])
    log.keep_changes(True)

    def write(size: int) -> None:
        with database.transaction():
            database.execute("INSERT OR REPLACE INTO reports VALUES ('r', ?, 0)", (bytes(size),))
            database.commit()

    def kept() -> list[int]:
        return [row[0] for row in database.query("SELECT sequence FROM changes ORDER BY sequence")]

    for _ in range(5):
        write(250)
    assert kept() == [3, 4, 5]
    write(2000)  # the last one is always kept
    assert kept() == [6]
    now[0] += 6
    write(1)
    assert kept() == [7]
    database.close()


def test_the_last_changes_are_kept_whatever_their_age() -> None:
    """A writer compares the last change of a follower with its log."""
    now = [1_000_000.0]
    database = MemoryDatabase()
    log = SqliteChangeLog(database, max_kept_ms=5000, clock=lambda: now[0])
    log.keep_changes(True)
    for _ in range(MIN_KEPT_CHANGES + 3):
        now[0] += 3600
        with database.transaction():
            database.execute("INSERT OR REPLACE INTO reports VALUES ('r', 'b', 0)")
            database.commit()
    kept = [row[0] for row in database.query("SELECT sequence FROM changes ORDER BY sequence")]
    assert kept == list(range(4, MIN_KEPT_CHANGES + 4))
    database.close()


def test_a_replica_that_is_not_the_writer_repeats_and_writes_nothing_else(
    writer: SqliteDocumentStore, follower: SqliteDocumentStore
) -> None:
    generation = add_collection(writer, "c")
    follower.database.may_write = lambda: False
    with pytest.raises(Unavailable, match="not the writer"):
        add_collection(follower, "c")
    catch_up(follower, writer)
    assert follower.collections() == writer.collections()
    answers = [True, False]
    writer.database.may_write = lambda: answers.pop(0)
    with pytest.raises(Unavailable, match="no longer the writer"):
        put(writer, "late", ["a"])
    assert writer.get("c", "late") is None
    assert len(writer.rows(generation)) == 0
