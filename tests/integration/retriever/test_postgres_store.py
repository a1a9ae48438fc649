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
from ragcache_retriever.store.postgres import lexical
from ragcache_retriever.store.postgres.connections.cancellation import CancellableConnection
from ragcache_retriever.store.postgres.document_store import PostgresDocumentStore
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
def store(url: str) -> Iterator[PostgresDocumentStore]:
    store = PostgresDocumentStore(url)
    yield store
    store.close()


@pytest.fixture
def other(url: str) -> Iterator[PostgresDocumentStore]:
    other = PostgresDocumentStore(url)
    yield other
    other.close()


def test_retrievers_that_start_together_make_one_schema(url: str) -> None:
    stores = [PostgresDocumentStore(url) for _ in range(4)]
    with ThreadPoolExecutor(len(stores)) as pool:
        assert list(pool.map(lambda one: one.collections(), stores)) == [{}] * 4
    for one in stores:
        one.close()


def test_writes_of_several_retrievers_are_all_counted(
    store: PostgresDocumentStore, other: PostgresDocumentStore
) -> None:
    generation = add_collection(store, "c", CollectionSettings(max_documents=12))

    def write(pair: tuple[PostgresDocumentStore, str]) -> int:
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
    found = store.collection("c")
    assert found is not None
    assert found.serving is not None
    page, _ = store.page("c", "", 100)
    assert found.num_documents == found.serving.num_documents == len(page) == 12
    assert refused == 9  # twenty of their own and the shared one; the limit refuses the rest
    assert found.serving.num_chunks == sum(one.num_chunks for one in page) == 24
    assert len(store.rows(generation)) == 24
    removals, last = other.removals(0, 1000)
    assert [one.sequence for one in removals] == list(range(1, last + 1))


def test_a_removal_with_a_lower_number_is_seen_first(
    store: PostgresDocumentStore, other: PostgresDocumentStore
) -> None:
    for name in ("c", "d"):
        add_collection(store, name)
        put(store, "x", ["old"], collection=name)
    is_removed, is_seen = threading.Event(), threading.Event()

    def remove_slowly() -> None:
        with store.transaction():
            store.delete("c", "x", NOW_MS)
            is_removed.set()
            is_seen.wait(LIMIT_S)
            store.commit()

    def remove() -> None:
        with other.transaction():
            other.delete("d", "x", NOW_MS)
            other.commit()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(remove_slowly)
        assert is_removed.wait(LIMIT_S)
        second = pool.submit(remove)
        reader = PostgresDocumentStore(store.database.url)
        assert reader.removals(0, 10) == ([], 0)
        assert not second.done()
        is_seen.set()
        first.result(LIMIT_S)
        second.result(LIMIT_S)
        removals, _ = reader.removals(0, 10)
        reader.close()
    assert [one.collection for one in removals] == ["c", "d"]


def test_claims_of_two_retrievers_do_not_wait_for_each_other(
    store: PostgresDocumentStore, other: PostgresDocumentStore
) -> None:
    add_collection(store, "c")
    for i in range(3):
        put(store, f"d{i}", [f"old {i}"])
        put(store, f"d{i}", [f"new {i}"])
    with store.transaction():
        first = store.outbox.claim(2, NOW_MS)
        with other.transaction():
            second = other.outbox.claim(10, NOW_MS)
            other.commit()
        store.commit()
    claimed = [one.id for one in (*first.deletes, *second.deletes)]
    assert len(first.deletes) == 2
    assert len(set(claimed)) == len(claimed) == 3


def test_a_generation_that_another_retriever_retired_is_not_written(
    store: PostgresDocumentStore, other: PostgresDocumentStore
) -> None:
    generation = add_collection(store, "c")
    with other.transaction():
        assert other.add_generation("c", RECIPE) == generation
        newer = other.add_generation("c", replace(RECIPE, splitter="other"))
        other.commit()
    assert newer != generation
    document = a_document("d")
    with pytest.raises(Unavailable, match="generation"), store.transaction():
        store.replace(
            "c",
            document,
            version_of(document),
            {generation: chunks_of(["text"])},
            now_ms=NOW_MS,
            claim=False,
        )


def write_and_lose_connection(store: PostgresDocumentStore, url: str) -> None:
    document = a_document("d", "new")
    with store.transaction():
        found = store.collection("c")
        assert found is not None
        chunks = {one.row: chunks_of(["new"]) for one in found.generations}
        store.replace("c", document, version_of(document), chunks, now_ms=NOW_MS, claim=False)
        [(pid,)] = store.database.query("SELECT pg_backend_pid()")
        with psycopg.connect(url, autocommit=True) as killer:
            killer.execute("SELECT pg_terminate_backend(%s)", (pid,))
        store.commit()


def test_a_connection_that_dies_in_a_transaction_changes_nothing(
    store: PostgresDocumentStore, url: str
) -> None:
    add_collection(store, "c")
    put(store, "d", ["old"])
    with pytest.raises(Unavailable, match="RAGCACHE_BACKEND_URL"):
        write_and_lose_connection(store, url)
    kept = store.get("c", "d")
    assert kept is not None
    assert kept.document.text == "old"
    put(store, "d", ["newer"])
    assert store.removals(0, 10)[1] == 1


def test_a_restarted_server_is_used_again(
    store: PostgresDocumentStore, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_collection(store, "c")
    put(store, "d", ["old"])
    postgres.stop()
    try:
        with monkeypatch.context() as short:
            short.setattr(store.database._pool, "timeout", 1.0)
            with pytest.raises(Unavailable, match="PostgreSQL"):
                store.get("c", "d")
    finally:
        postgres.start()
    assert store.get("c", "d") is not None
    put(store, "d", ["new"])


def test_a_store_waits_for_a_server_that_starts_later(
    postgres: PostgresServer, store: PostgresDocumentStore
) -> None:
    postgres.stop()
    try:
        with pytest.raises(Unavailable, match="RAGCACHE_BACKEND_URL"):
            store.collections()
    finally:
        postgres.start()
    assert store.collections() == {}


@pytest.mark.parametrize("url", ["", "sqlite:///x", "postgresql://u:secret@[h/d", "host=x"])
def test_an_url_that_is_none_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InvalidInput, match="RAGCACHE_BACKEND_URL") as caught:
        PostgresDocumentStore(url)
    assert "secret" not in str(caught.value)


def test_another_schema_version_is_refused(store: PostgresDocumentStore, url: str) -> None:
    store.collections()
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE ragcache_schema SET version = 99")
    newer = PostgresDocumentStore(url)
    with pytest.raises(InvalidInput, match="schema 99"):
        newer.collections()
    newer.close()


def test_text_that_postgresql_cannot_store_is_refused(store: PostgresDocumentStore) -> None:
    add_collection(store, "c")
    with pytest.raises(InvalidInput, match="NUL"):
        put(store, "d", ["a\0b"])
    assert store.page("c", "", 10) == ([], None)


def test_a_query_that_nobody_waits_for_is_cancelled(store: PostgresDocumentStore) -> None:
    is_cancelled = threading.Event()
    timer = threading.Timer(0.2, is_cancelled.set)
    timer.start()
    with pytest.raises(Unavailable, match="cancel") as caught:
        sleep(store, is_cancelled)
    timer.join()
    assert isinstance(caught.value.__cause__, psycopg.errors.QueryCanceled)
    assert store.collections() == {}


def sleep(store: PostgresDocumentStore, is_cancelled: threading.Event) -> None:
    with (
        store.database.snapshot() as connection,
        connection.cancelled_by(is_cancelled.is_set),
    ):
        connection.execute("SELECT pg_sleep(3600)")


def test_a_collection_that_another_retriever_deletes_takes_no_document(
    store: PostgresDocumentStore, other: PostgresDocumentStore
) -> None:
    generation = add_collection(store, "c")
    with store.transaction():
        store.start_deleting("c")
        store.commit()
    with pytest.raises(Unavailable, match="another one has changed"):
        put(other, "d", ["a"])
    document = a_document("d", "a")
    with other.transaction():
        chunks = chunks_of(["a"])
        version = version_of(document)
        assert other.put_chunks("c", "d", version.content_hash, generation, chunks) is None


@contextlib.contextmanager
def held_words(url: str, generation: int) -> Iterator[None]:
    """Let every search by words wait for a lock."""
    with psycopg.connect(url) as holder:
        holder.execute(f"LOCK TABLE {postings_table(generation)} IN ACCESS EXCLUSIVE MODE")
        yield


def test_a_search_by_words_ends_after_its_time(
    store: PostgresDocumentStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = add_collection(store, "c")
    put(store, "d", ["apple"])
    with monkeypatch.context() as short, held_words(url, generation):
        short.setattr(lexical, "LIMIT_S", 1.0)
        with pytest.raises(Unavailable, match="longer than 1 s"):
            store.lexical_hits(generation, ["apple"], 10)
    assert len(store.lexical_hits(generation, ["apple"], 10)) == 1


def test_the_server_ends_a_search_by_words_itself(
    store: PostgresDocumentStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = add_collection(store, "c")
    put(store, "d", ["apple"])
    monkeypatch.setattr(lexical, "LIMIT_S", 1.0)
    # As in a process that stands still.
    monkeypatch.setattr(CancellableConnection, "cancel_safe", lambda *_, **__: None)
    with held_words(url, generation), pytest.raises(Unavailable, match="longer than 1 s"):
        store.lexical_hits(generation, ["apple"], 10)


def test_a_search_by_words_that_nobody_waits_for_is_cancelled(
    store: PostgresDocumentStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = add_collection(store, "c")
    put(store, "d", ["apple"])
    is_cancelled = threading.Event()
    timer = threading.Timer(0.2, is_cancelled.set)
    timer.start()
    with held_words(url, generation), pytest.raises(Unavailable, match="was left"):
        store.lexical_hits(generation, ["apple"], 10, cancelled=is_cancelled.is_set)
    timer.join()
