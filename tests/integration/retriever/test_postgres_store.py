"""Several retrievers use one PostgreSQL store, which restarts and loses connections."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psycopg
import pytest

from ragcache_core.errors import InvalidInput, TooLarge, Unavailable
from ragcache_retriever.documents.collection import CollectionSettings
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.postgres import lexical
from ragcache_retriever.store.postgres.cancellation import CancellableConnection
from ragcache_retriever.store.postgres.document_store import PostgresStore, open_postgres
from ragcache_retriever.store.postgres.schema import postings_table
from tests.kit.postgres_server import PostgresServer
from tests.kit.stored_documents import (
    NOW_MS,
    RECIPE,
    a_document,
    add_collection,
    chunks_of,
    put,
    version_of,
)

LIMIT_S = 60


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.new_schema()


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    store = open_postgres(url)
    yield store
    store.database.close()


@pytest.fixture
def other(url: str) -> Iterator[PostgresStore]:
    other = open_postgres(url)
    yield other
    other.database.close()


def test_retrievers_that_start_together_make_one_schema(url: str) -> None:
    stores = [open_postgres(url) for _ in range(4)]
    with ThreadPoolExecutor(len(stores)) as pool:
        assert list(pool.map(lambda one: one.collections.all(), stores)) == [{}] * 4
    for one in stores:
        one.database.close()


def test_writes_of_several_retrievers_are_all_counted(
    store: PostgresStore, other: PostgresStore
) -> None:
    generation = add_collection(store, "c", CollectionSettings(max_documents=12))

    def write(pair: tuple[DocumentStore, str]) -> int:
        opened, name = pair
        refused = 0
        for i in range(10):
            try:
                put(opened, f"{name}{i}", [name, "common"])
                put(opened, "shared", [name, str(i)])
            except TooLarge:
                refused += 1
        return refused

    with ThreadPoolExecutor(2) as pool:
        refused = sum(pool.map(write, [(store, "a"), (other, "b")]))
    found = store.collections.one("c")
    assert found is not None
    assert found.serving is not None
    page, _ = store.reads.page("c", "", 100)
    assert found.num_documents == found.serving.num_documents == len(page) == 12
    assert refused == 9  # twenty of their own and the shared one; the limit refuses the rest
    assert found.serving.num_chunks == sum(one.num_chunks for one in page) == 24
    assert len(store.embeddings.rows(generation)) == 24
    removals, last = other.outbox.removals(0, 1000)
    assert [one.sequence for one in removals] == list(range(1, last + 1))


def test_a_removal_with_a_lower_number_is_seen_first(
    store: PostgresStore, other: PostgresStore
) -> None:
    for name in ("c", "d"):
        add_collection(store, name)
        put(store, "x", ["old"], collection=name)
    is_removed, is_seen = threading.Event(), threading.Event()

    def remove_slowly() -> None:
        with store.database.transaction():
            store.documents.delete("c", "x", NOW_MS)
            is_removed.set()
            is_seen.wait(LIMIT_S)
            store.database.commit()

    def remove() -> None:
        with other.database.transaction():
            other.documents.delete("d", "x", NOW_MS)
            other.database.commit()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(remove_slowly)
        assert is_removed.wait(LIMIT_S)
        second = pool.submit(remove)
        reader = open_postgres(store.database.url)
        assert reader.outbox.removals(0, 10) == ([], 0)
        assert not second.done()
        is_seen.set()
        first.result(LIMIT_S)
        second.result(LIMIT_S)
        removals, _ = reader.outbox.removals(0, 10)
        reader.database.close()
    assert [one.collection for one in removals] == ["c", "d"]


def test_claims_of_two_retrievers_do_not_wait_for_each_other(
    store: PostgresStore, other: PostgresStore
) -> None:
    add_collection(store, "c")
    for i in range(3):
        put(store, f"d{i}", [f"old {i}"])
        put(store, f"d{i}", [f"new {i}"])
    with store.database.transaction():
        first = store.outbox.claim(2, NOW_MS)
        with other.database.transaction():
            second = other.outbox.claim(10, NOW_MS)
            other.database.commit()
        store.database.commit()
    claimed = [one.id for one in (*first.deletes, *second.deletes)]
    assert len(first.deletes) == 2
    assert len(set(claimed)) == len(claimed) == 3


def test_a_generation_that_another_retriever_retired_is_not_written(
    store: PostgresStore, other: PostgresStore
) -> None:
    generation = add_collection(store, "c")
    with other.database.transaction():
        assert other.collections.add_generation("c", RECIPE) == generation
        newer = other.collections.add_generation("c", replace(RECIPE, splitter="other"))
        other.database.commit()
    assert newer != generation
    document = a_document("d")
    with pytest.raises(Unavailable, match="generation"), store.database.transaction():
        store.documents.replace(
            "c",
            document,
            version_of(document),
            {generation: chunks_of(["text"])},
            now_ms=NOW_MS,
            claim=False,
        )


def write_and_lose_connection(store: PostgresStore, url: str) -> None:
    document = a_document("d", "new")
    with store.database.transaction():
        found = store.collections.one("c")
        assert found is not None
        chunks = {one.row: chunks_of(["new"]) for one in found.generations}
        store.documents.replace(
            "c", document, version_of(document), chunks, now_ms=NOW_MS, claim=False
        )
        [(pid,)] = store.database.query("SELECT pg_backend_pid()")
        with psycopg.connect(url, autocommit=True) as killer:
            killer.execute("SELECT pg_terminate_backend(%s)", (pid,))
        store.database.commit()


def test_a_connection_that_dies_in_a_transaction_changes_nothing(
    store: PostgresStore, url: str
) -> None:
    add_collection(store, "c")
    put(store, "d", ["old"])
    with pytest.raises(Unavailable, match="RAGCACHE_BACKEND_URL"):
        write_and_lose_connection(store, url)
    kept = store.reads.get("c", "d")
    assert kept is not None
    assert kept.document.text == "old"
    put(store, "d", ["newer"])
    assert store.outbox.removals(0, 10)[1] == 1


def test_a_restarted_server_is_used_again(
    store: PostgresStore, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_collection(store, "c")
    put(store, "d", ["old"])
    postgres.stop()
    try:
        with monkeypatch.context() as short:
            short.setattr(store.database._pool, "timeout", 1.0)
            with pytest.raises(Unavailable, match="PostgreSQL"):
                store.reads.get("c", "d")
    finally:
        postgres.start()
    assert store.reads.get("c", "d") is not None
    put(store, "d", ["new"])


def test_a_store_waits_for_a_server_that_starts_later(
    postgres: PostgresServer, store: PostgresStore
) -> None:
    postgres.stop()
    try:
        with pytest.raises(Unavailable, match="RAGCACHE_BACKEND_URL"):
            store.collections.all()
    finally:
        postgres.start()
    assert store.collections.all() == {}


@pytest.mark.parametrize("url", ["", "sqlite:///x", "postgresql://u:secret@[h/d", "host=x"])
def test_an_url_that_is_none_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InvalidInput, match="RAGCACHE_BACKEND_URL") as caught:
        open_postgres(url)
    assert "secret" not in str(caught.value)


def test_another_schema_version_is_refused(store: PostgresStore, url: str) -> None:
    store.collections.all()
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE ragcache_schema SET version = 99")
    newer = open_postgres(url)
    with pytest.raises(InvalidInput, match="schema 99"):
        newer.collections.all()
    newer.database.close()


def test_text_that_postgresql_cannot_store_is_refused(
    store: PostgresStore,
) -> None:
    add_collection(store, "c")
    with pytest.raises(InvalidInput, match="NUL"):
        put(store, "d", ["a\0b"])
    assert store.reads.page("c", "", 10) == ([], None)


def test_a_query_that_nobody_waits_for_is_cancelled(store: PostgresStore) -> None:
    is_cancelled = threading.Event()
    timer = threading.Timer(0.2, is_cancelled.set)
    timer.start()
    with pytest.raises(Unavailable, match="cancel") as caught:
        sleep(store, is_cancelled)
    timer.join()
    assert isinstance(caught.value.__cause__, psycopg.errors.QueryCanceled)
    assert store.collections.all() == {}


def sleep(store: PostgresStore, is_cancelled: threading.Event) -> None:
    with (
        store.database.snapshot() as connection,
        connection.cancelled_by(is_cancelled.is_set),
    ):
        connection.execute("SELECT pg_sleep(3600)")


def test_a_collection_that_another_retriever_deletes_takes_no_document(
    store: PostgresStore, other: PostgresStore
) -> None:
    generation = add_collection(store, "c")
    with store.database.transaction():
        store.collections.start_deleting("c")
        store.database.commit()
    with pytest.raises(Unavailable, match="another one has changed"):
        put(other, "d", ["a"])
    document = a_document("d", "a")
    with other.database.transaction():
        chunks = chunks_of(["a"])
        version = version_of(document)
        assert (
            other.documents.put_chunks("c", "d", version.content_hash, generation, chunks) is None
        )


@contextlib.contextmanager
def held_words(url: str, generation: int) -> Iterator[None]:
    """Let every search by words wait for a lock."""
    with psycopg.connect(url) as holder:
        holder.execute(f"LOCK TABLE {postings_table(generation)} IN ACCESS EXCLUSIVE MODE")
        yield


def test_a_search_by_words_ends_after_its_time(
    store: PostgresStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = add_collection(store, "c")
    put(store, "d", ["apple"])
    with monkeypatch.context() as short, held_words(url, generation):
        short.setattr(lexical, "LIMIT_S", 1.0)
        with pytest.raises(Unavailable, match="longer than 1 s"):
            store.lexical.hits(generation, ["apple"], 10)
    assert len(store.lexical.hits(generation, ["apple"], 10)) == 1


def test_the_server_ends_a_search_by_words_itself(
    store: PostgresStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = add_collection(store, "c")
    put(store, "d", ["apple"])
    monkeypatch.setattr(lexical, "LIMIT_S", 1.0)
    # As in a process that stands still.
    monkeypatch.setattr(CancellableConnection, "cancel_safe", lambda *_, **__: None)
    with held_words(url, generation), pytest.raises(Unavailable, match="longer than 1 s"):
        store.lexical.hits(generation, ["apple"], 10)


def test_a_search_by_words_that_nobody_waits_for_is_cancelled(
    store: PostgresStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = add_collection(store, "c")
    put(store, "d", ["apple"])
    is_cancelled = threading.Event()
    timer = threading.Timer(0.2, is_cancelled.set)
    timer.start()
    with held_words(url, generation), pytest.raises(Unavailable, match="was left"):
        store.lexical.hits(generation, ["apple"], 10, cancelled=is_cancelled.is_set)
    timer.join()
